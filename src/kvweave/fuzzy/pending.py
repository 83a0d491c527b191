"""Pending donors: running prompts whose text a waiting prompt can use once it is published.

Two requests bring the same document behind different headers at the same time. The second can be
served from the first as soon as that has published the document, so it waits if that saves much.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.matcher import EqualRun, HashArray, TextIndex, window_hashes
from kvweave.kv.pool import IntArray
from kvweave.prefix.hash_index import namespace_seed
from kvweave.prefix.lease import Lease, RequestView

_LEAST_SPANS, _LEAST_SHARE = 4, 0.25
"""A request waits for at least this many shortest spans, and this share of the tokens that it
would compute."""


class _PendingDonor:
    """A lease that will publish more of its prompt."""

    def __init__(self, lease: Lease, tokens: IntArray, page_size: int, stride: int) -> None:
        self.lease = lease
        self._tokens = tokens
        self._page_size = page_size
        self._stride = stride
        self._index: TextIndex | None = None
        self._shared: dict[str, tuple[IntArray, list[EqualRun]]] = {}
        """By request: the tokens that were compared, and the result. Neither ever changes."""

    @property
    def remaining(self) -> tuple[int, int]:
        """The positions that it will publish: from, to."""
        end = min(len(self._tokens), self.lease.plan.publishable)
        return self.lease.published, end // self._page_size * self._page_size

    def shared(self, view: RequestView) -> list[EqualRun] | None:
        """What `compare` found for this prompt; None if it was not called."""
        tokens, runs = self._shared.get(view.rid, (None, None))
        return runs if tokens is view.tokens else None

    def compare(self, view: RequestView, windows: HashArray, seconds: float) -> list[EqualRun]:
        """The runs that `view` shares with unpublished text; `windows` are its hashes."""
        if self._index is None:
            begin, end = self.remaining
            begin -= begin % self._stride
            seed = namespace_seed(self.lease.namespace)
            self._index = TextIndex(self._tokens, self._stride, seed, begin, end)
        runs = self._index.runs(view.tokens, windows, seconds)
        self._shared[view.rid] = view.tokens, runs
        return runs


class PendingDonors:
    """Compares what running requests will publish with what waiting ones could use elsewhere."""

    def __init__(self, page_size: int, config: FuzzyConfig) -> None:
        self._page_size = page_size
        self._stride = config.stride
        self._shortest = config.min_span
        self._least = _LEAST_SPANS * config.min_span
        self._least_reuse_ratio = config.min_reuse_ratio
        self._seconds = config.time_budget_ms / 2000
        self._donors: dict[Lease, _PendingDonor] = {}

    def add(self, lease: Lease, tokens: IntArray) -> None:
        """`lease` computes `tokens` and will publish those that its plan leaves exact."""
        donor = _PendingDonor(lease, tokens, self._page_size, self._stride)
        begin, end = donor.remaining
        if end - begin >= self._least:
            self._donors[lease] = donor

    def discard(self, lease: Lease) -> None:
        """`lease` will publish nothing any more."""
        self._donors.pop(lease, None)

    def awaited(self, view: RequestView, matched: int) -> int:
        """Tokens behind `matched` that one running request will soon offer as donor; 0 if few."""
        length = len(view.tokens)
        least = max(
            self._least, _LEAST_SHARE * (length - matched), self._least_reuse_ratio * length
        )
        windows: HashArray | None = None
        most = 0
        for donor in list(self._donors.values()):
            begin, end = donor.remaining
            if end - begin < self._least:
                self.discard(donor.lease)  # what is left to publish only shrinks
            if end - begin < least or donor.lease.namespace != view.namespace:
                continue
            shared = donor.shared(view)
            if shared is None:
                if windows is None:
                    seed = namespace_seed(view.namespace)
                    windows = window_hashes(view.tokens, self._stride, seed)
                shared = donor.compare(view, windows, self._seconds)
            most = max(most, sum(self._useful(shared, matched, begin, end)))
        return most if most >= least else 0

    def _useful(self, shared: list[EqualRun], matched: int, begin: int, end: int) -> Iterator[int]:
        """Lengths of the parts that are neither served already nor published yet."""
        for run in shared:
            skip = max(0, matched - run.start, begin - run.donor_start)
            length = min(run.donor_start + run.length, end) - run.donor_start - skip
            if length >= self._shortest:
                yield length
