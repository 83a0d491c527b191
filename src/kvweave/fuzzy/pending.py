"""Prompts that are being computed right now: donors to be, and worth waiting for if they save much.

When two requests bring the same document behind different headers at the same time, the second can
be served from the first as soon as that has published the document. Computing it twice is what
waiting avoids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.anchors import AnchorTable, HashArray, block_hashes, window_hashes
from kvweave.fuzzy.donors import common_suffix
from kvweave.fuzzy.span_index import DOORS_TRIED, runs_through
from kvweave.kv.pool import IntArray
from kvweave.prefix.hash_index import namespace_seed
from kvweave.prefix.lease import Lease, RequestView
from kvweave.prefix.tree import common_prefix

_LEAST_SPANS, _LEAST_SHARE = 4, 0.25
"""Worth waiting for: this many shortest spans, and this share of what would be computed instead."""


class _Shared(NamedTuple):
    """Equal tokens: from position `start` of the waiting prompt, `there` of the other one."""

    start: int
    length: int
    there: int


class _Producer:
    """A lease that is still to publish parts of its prompt."""

    def __init__(self, lease: Lease, tokens: IntArray, page_size: int, stride: int) -> None:
        self.lease = lease
        self._tokens = tokens
        self._page_size = page_size
        self._stride = stride
        self._anchors: AnchorTable | None = None
        self._shared: dict[str, tuple[IntArray, list[_Shared]]] = {}
        """By request: the tokens that were compared, and what was found. Neither ever changes."""

    @property
    def remaining(self) -> tuple[int, int]:
        """The positions that it will publish: from, to."""
        end = min(len(self._tokens), self.lease.plan.publishable)
        return self.lease.published, end // self._page_size * self._page_size

    def shared(self, view: RequestView) -> list[_Shared] | None:
        """What `compare` found for this very prompt; None if it was never asked."""
        tokens, runs = self._shared.get(view.rid, (None, None))
        return runs if tokens is view.tokens else None

    def compare(self, view: RequestView, hashes: HashArray, seconds: float) -> list[_Shared]:
        """The runs that `view` shares with what is unpublished; `hashes` are its windows'."""
        anchors = self._anchors
        if anchors is None:
            anchors = self._anchors = self._open_doors()
        offsets, found = anchors.probe(hashes)

        def longest_at(hit: int) -> _Shared | None:
            last = int(offsets[hit]) + self._stride - 1
            runs = [
                self._run(view.tokens, last, there)
                for there in anchors.slots(int(found[hit]), DOORS_TRIED)
            ]
            best = max(runs, key=lambda run: run.length)
            return best if best.start <= offsets[hit] else None

        runs = runs_through(offsets, 2 * self._stride - 1, longest_at, seconds)
        self._shared[view.rid] = view.tokens, runs
        return runs

    def _run(self, tokens: IntArray, here: int, there: int) -> _Shared:
        before = common_suffix(tokens[: here + 1], self._tokens[: there + 1])
        after = common_prefix(tokens[here + 1 :], self._tokens[there + 1 :])
        return _Shared(here + 1 - before, before + after, there + 1 - before)

    def _open_doors(self) -> AnchorTable:
        begin, end = self.remaining
        begin -= begin % self._stride
        seed = namespace_seed(self.lease.namespace)
        hashes = block_hashes(self._tokens[begin:end], self._stride, seed)
        anchors = AnchorTable(end, end, self._stride)
        last = begin + self._stride - 1 + self._stride * np.arange(len(hashes), dtype=np.int32)
        anchors.open(hashes, last.astype(np.int32))
        return anchors


class Inflight:
    """What running requests will publish, compared with what waiting ones could use elsewhere."""

    def __init__(self, page_size: int, config: FuzzyConfig) -> None:
        self._page_size = page_size
        self._stride = config.stride
        self._shortest = config.min_span
        self._least = _LEAST_SPANS * config.min_span
        self._least_reuse_ratio = config.min_reuse_ratio
        self._seconds = config.time_budget_ms / 2000
        self._pending: dict[Lease, _Producer] = {}

    def add(self, lease: Lease, tokens: IntArray) -> None:
        """`lease` computes `tokens`, and will publish what its plan leaves exact."""
        producer = _Producer(lease, tokens, self._page_size, self._stride)
        begin, end = producer.remaining
        if end - begin >= self._least:
            self._pending[lease] = producer

    def discard(self, lease: Lease) -> None:
        """`lease` is gone."""
        self._pending.pop(lease, None)

    def awaited(self, view: RequestView, matched: int) -> int:
        """Tokens behind `matched` that one running request will soon offer as donor; 0 if few."""
        length = len(view.tokens)
        least = max(
            self._least, _LEAST_SHARE * (length - matched), self._least_reuse_ratio * length
        )
        hashes: HashArray | None = None
        most = 0
        for producer in list(self._pending.values()):
            begin, end = producer.remaining
            if end - begin < self._least:
                self.discard(producer.lease)  # nearly done: its prompt never gets longer
            if end - begin < least or producer.lease.namespace != view.namespace:
                continue
            shared = producer.shared(view)
            if shared is None:
                if hashes is None:
                    seed = namespace_seed(view.namespace)
                    hashes = window_hashes(view.tokens, self._stride, seed)
                shared = producer.compare(view, hashes, self._seconds)
            most = max(most, sum(self._useful(shared, matched, begin, end)))
        return most if most >= least else 0

    def _useful(self, shared: list[_Shared], matched: int, begin: int, end: int) -> Iterator[int]:
        """Lengths of those parts that are not served already, and not published yet."""
        for run in shared:
            skip = max(0, matched - run.start, begin - run.there)
            length = min(run.there + run.length, end) - run.there - skip
            if length >= self._shortest:
                yield length
