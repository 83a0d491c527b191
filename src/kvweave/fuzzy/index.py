"""The built-in provider: side doors into the tree, one a stride of tokens.

Every published path is cut into blocks of `stride` tokens, at multiples of the stride from its
beginning, and each block's hash is a door to where the block ends. A prompt asks for the hash of
its windows at every offset, as rsync does; a hit is compared with the tree and extended both ways.

So, whatever the shift, a shared run of at least 2 x stride - 1 tokens holds a whole block of its
donor. It is found, or all of it but fewer than `stride` tokens at either end lies within others
that are. Where many paths share a block, the longest run among the newest few is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.doors import DoorTable
from kvweave.fuzzy.hashing import block_hashes, window_hashes
from kvweave.fuzzy.provider import Candidate, Donors, FuzzyMatchProvider, PublishedRun
from kvweave.fuzzy.sweep import DOORS_TRIED, runs_through
from kvweave.kv.pool import IntArray
from kvweave.prefix.chain import namespace_seed
from kvweave.prefix.lease import RequestView


class SpanIndex(FuzzyMatchProvider):
    """Finds runs of a prompt that are cached anywhere, at any shift, from any number of donors."""

    bounded = True

    def __init__(self, donors: Donors, config: FuzzyConfig) -> None:
        super().__init__(donors, config)
        self._stride = config.fuzzy_stride
        self._seconds = config.fuzzy_time_budget_ms / 2000  # half the budget: be late for nobody
        self.doors = DoorTable(donors.num_pages * donors.page_size, donors.page_size, self._stride)

    def match(self, view: RequestView, exact: int) -> Sequence[Candidate]:
        seed = namespace_seed(view.namespace)
        offsets, doors = self.doors.probe(window_hashes(view.tokens[exact:], self._stride, seed))
        offsets += exact

        def longest_at(hit: int) -> Candidate | None:
            return self._longest(view, int(offsets[hit]), int(doors[hit]))

        return runs_through(offsets, 2 * self._stride - 1, longest_at, self._seconds)

    def _longest(self, view: RequestView, offset: int, door: int) -> Candidate | None:
        """The longest run through the window at `offset`, among the newest places of its text."""
        best = None
        for slot in self.doors.slots(door, DOORS_TRIED):
            page, within = divmod(slot, self.donors.page_size)
            run = self.donors.run_around(
                view, offset + self._stride - 1, page, self.donors.start(page) + within
            )
            if run is not None and run.start <= offset and (not best or run.length > best.length):
                best = run
        return best

    def on_published(self, run: PublishedRun) -> None:
        size, stride = self.donors.page_size, self._stride
        block = run.start // stride  # the first block that ends in the run
        first, end = block * stride, run.start + len(run.tokens)
        if end < first + stride:
            return
        tokens = run.tokens
        if first < run.start:
            tokens = self.donors.tokens(int(run.pages[-1]), first)
        hashes = block_hashes(tokens, stride, namespace_seed(run.namespace))
        last = first + stride - 1 + stride * np.arange(len(hashes)) - run.start
        self.doors.open(hashes, (run.pages[last // size] * size + last % size).astype(np.int32))

    def on_evicted(self, pages: IntArray) -> None:
        self.doors.close(pages)

    def clear(self) -> None:
        self.doors.clear()

    def stats(self) -> Mapping[str, float]:
        return {"doors": len(self.doors), "bytes": self.doors.nbytes}
