"""The provider `spans`: anchors over the radix tree find equal text wherever it is cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.anchors import AnchorTable
from kvweave.fuzzy.matcher import anchors_of, runs_through, window_hashes
from kvweave.fuzzy.provider import Candidate, Donors, FuzzyMatchProvider, PublishedRun
from kvweave.kv.pool import IntArray
from kvweave.prefix.hash_index import namespace_seed
from kvweave.prefix.lease import RequestView


class SpanIndex(FuzzyMatchProvider):
    """Finds runs of a prompt that are cached anywhere, at any shift, from any number of donors."""

    bounded = True

    def __init__(self, donors: Donors, config: FuzzyConfig) -> None:
        super().__init__(donors, config)
        self._stride = config.stride
        self._seconds = config.time_budget_ms / 2000  # half of what a request may wait
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

        return runs_through(offsets, self._stride, longest_at, self._seconds)

    def _longest(self, view: RequestView, offset: int, anchor: int) -> Candidate | None:
        """The longest run through the window at `offset`, among the newest places of its text."""

        def run_at(slot: int) -> Candidate | None:
            page, within = divmod(slot, self.donors.page_size)
            last = offset + self._stride - 1
            return self.donors.run_around(view, last, page, self.donors.start(page) + within)

        return self.anchors.longest_run(anchor, offset, run_at)

    def on_published(self, run: PublishedRun) -> None:
        size, stride = self.donors.page_size, self._stride
        first = run.start // stride * stride  # the first window that ends in the run begins here
        if run.start + len(run.tokens) < first + stride:
            return
        tokens = run.tokens
        if first < run.start:
            tokens = self.donors.tokens(int(run.pages[-1]), first)
        seed = namespace_seed(run.namespace)
        hashes, ends = anchors_of(tokens, first, run.start, stride, seed)
        ends -= run.start
        self.anchors.open(hashes, (run.pages[ends // size] * size + ends % size).astype(np.int32))

    def on_evicted(self, pages: IntArray) -> None:
        self.anchors.close(pages)

    def clear(self) -> None:
        self.anchors.clear()

    def stats(self) -> Mapping[str, float]:
        return {"anchors": len(self.anchors), "bytes": self.anchors.nbytes}
