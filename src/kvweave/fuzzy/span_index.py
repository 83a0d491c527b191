"""From windows that might match to the runs around them, looking at no run twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.anchors import AnchorTable, block_hashes, window_hashes
from kvweave.fuzzy.provider import Candidate, Donors, FuzzyMatchProvider, PublishedRun
from kvweave.kv.pool import IntArray
from kvweave.prefix.hash_index import namespace_seed
from kvweave.prefix.lease import RequestView

DOORS_TRIED = 4
"""How many places of the same block are compared for the longest run."""


class Run(Protocol):
    """Equal tokens from position `start` of the prompt on."""

    @property
    def start(self) -> int: ...

    @property
    def length(self) -> int: ...


RunT = TypeVar("RunT", bound=Run)


def runs_through(
    offsets: npt.NDArray[np.intp],
    shortest: int,
    longest_at: Callable[[int], RunT | None],
    seconds: float,
) -> list[RunT]:
    """Runs of at least `shortest` tokens through windows at `offsets` (ascending), last one first.

    `longest_at` gives the longest run through the window at `offsets[i]`, or None if its hash lied.
    From the right, since the newest anchor of a periodic text is its deepest, from where one look
    finds all of it. Windows inside a run found are passed over. Stops after `seconds` with what
    there is: a prompt made of very many small pieces is not worth looking at all of them.
    """
    runs: list[RunT] = []
    at = len(offsets) - 1
    deadline = time.perf_counter() + seconds
    while at >= 0 and time.perf_counter() < deadline:
        run = longest_at(at)
        if run is None or run.length < shortest:
            at -= 1
        else:
            runs.append(run)
            at = int(np.searchsorted(offsets, run.start)) - 1
    return runs


class SpanIndex(FuzzyMatchProvider):
    """Finds runs of a prompt that are cached anywhere, at any shift, from any number of donors."""

    bounded = True

    def __init__(self, donors: Donors, config: FuzzyConfig) -> None:
        super().__init__(donors, config)
        self._stride = config.stride
        self._seconds = config.time_budget_ms / 2000  # half the budget: be late for nobody
        self.anchors = AnchorTable(
            donors.num_pages * donors.page_size, donors.page_size, self._stride
        )

    def match(self, view: RequestView, exact: int) -> Sequence[Candidate]:
        seed = namespace_seed(view.namespace)
        offsets, anchors = self.anchors.probe(
            window_hashes(view.tokens[exact:], self._stride, seed)
        )
        offsets += exact

        def longest_at(hit: int) -> Candidate | None:
            return self._longest(view, int(offsets[hit]), int(anchors[hit]))

        return runs_through(offsets, 2 * self._stride - 1, longest_at, self._seconds)

    def _longest(self, view: RequestView, offset: int, anchor: int) -> Candidate | None:
        """The longest run through the window at `offset`, among the newest places of its text."""
        best = None
        for slot in self.anchors.slots(anchor, DOORS_TRIED):
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
        self.anchors.open(hashes, (run.pages[last // size] * size + last % size).astype(np.int32))

    def on_evicted(self, pages: IntArray) -> None:
        self.anchors.close(pages)

    def clear(self) -> None:
        self.anchors.clear()

    def stats(self) -> Mapping[str, float]:
        return {"anchors": len(self.anchors), "bytes": self.anchors.nbytes}
