"""Where the KV of every prompt position comes from.

A plan is the one thing that the scheduler knows about reuse: which positions are served and
which it has to compute. Exact backends give `exact | fresh`; fuzzy ones weave spans in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvweave.errors import IntegrityError
from kvweave.kv.pool import IntArray


class Tier(str, Enum):
    """How KV that is not computed came to be served."""

    EXACT = "exact"
    MOVED = "moved"
    PARAPHRASE = "paraphrase"


@dataclass(frozen=True, slots=True)
class Span:
    """A run of recipient positions served from one donor run.

    `donor` identifies the donor's path to people and logs (a request id, or a path's number);
    nobody resolves KV through it. Positions are absolute: `start` in the recipient's prompt,
    `donor_start` in the donor's.
    """

    start: int
    length: int
    donor: str
    donor_start: int
    tier: Tier = Tier.MOVED

    @property
    def end(self) -> int:
        return self.start + self.length


def _no_positions() -> IntArray:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Covers every position once: `[0, exact)` from the tree, then spans, the rest fresh.

    `refresh` lists positions inside spans that are computed although donor KV exists. `compute` is
    everything that the forward pass has to run, in ascending order: the fresh and the refreshed.
    Immutable; a plan that does not add up raises IntegrityError when built.
    """

    length: int
    exact: int = 0
    spans: tuple[Span, ...] = ()
    refresh: IntArray = field(default_factory=_no_positions)
    compute: IntArray = field(init=False)

    def __post_init__(self) -> None:
        self._check()
        if not self.spans:
            compute = np.arange(self.exact, self.length, dtype=np.int32)
        else:
            mask = np.ones(self.length, np.bool_)
            mask[: self.exact] = False
            for span in self.spans:
                mask[span.start : span.end] = False
            mask[self.refresh] = True
            compute = np.flatnonzero(mask).astype(np.int32)
        compute.setflags(write=False)
        object.__setattr__(self, "compute", compute)

    def _check(self) -> None:
        if not 0 <= self.exact < max(self.length, 1):
            raise IntegrityError(
                f"an exact prefix of {self.exact} leaves nothing to compute of {self.length} tokens"
            )
        covered = self.exact
        for span in self.spans:
            if span.start < covered or span.length < 1 or span.end >= self.length:
                raise IntegrityError(
                    f"span [{span.start}, {span.end}) overlaps what lies before {covered} "
                    f"or leaves no last token of {self.length}"
                )
            covered = span.end

    @property
    def served(self) -> int:
        """Tokens that spans serve and nothing refreshes (the exact prefix is not among them)."""
        return self.length - self.exact - len(self.compute)

    def served_by(self, tier: Tier) -> int:
        """Tokens that spans of one tier serve and nothing refreshes."""
        spans = [span for span in self.spans if span.tier is tier]
        edges = np.array([(span.start, span.end) for span in spans], np.int64).reshape(-1, 2)
        refreshed = np.diff(np.searchsorted(self.refresh, edges), axis=1)
        return int(np.diff(edges, axis=1).sum() - refreshed.sum())

    @property
    def refreshed(self) -> tuple[tuple[int, int], ...]:
        """`refresh` as runs: (start, length)."""
        if not len(self.refresh):
            return ()
        ends = np.flatnonzero(np.diff(self.refresh) != 1)
        starts = self.refresh[np.concatenate(([0], ends + 1))]
        lengths = np.diff(np.concatenate(([-1], ends, [len(self.refresh) - 1])))
        return tuple(zip(starts.tolist(), lengths.tolist(), strict=True))

    @property
    def approximate(self) -> bool:
        return bool(self.spans)

    @property
    def publishable(self) -> int:
        """Positions below this one have exact KV once computed; none from here on may be shared."""
        return self.spans[0].start if self.spans else self.length

    def frontier(self, done: int) -> int:
        """All positions below the result have KV once the first `done` of `compute` have run."""
        return int(self.compute[done]) if done < len(self.compute) else self.length
