"""Plans: where the KV of every prompt position comes from.

A plan is all that the scheduler needs to know about reuse: which positions are served and which
have to be computed. Exact backends give `exact | fresh`; fuzzy ones weave spans in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvweave.errors import IntegrityError
from kvweave.kv.pool import IntArray

BoolArray: TypeAlias = npt.NDArray[np.bool_]


class Tier(str, Enum):
    """How KV that is not computed came to be served."""

    EXACT = "exact"
    MOVED = "moved"
    PARAPHRASE = "paraphrase"


@dataclass(frozen=True, slots=True)
class Span:
    """A run of recipient positions served from one donor run.

    `donor` names the donor's path for people and logs (a request id, or a path's number); it is
    not used to find KV. Positions are absolute: `start` in the recipient's prompt,
    `donor_start` in the donor's.
    """

    start: int
    length: int
    donor: str
    donor_start: int
    tier: Tier = Tier.MOVED
    generation: int = 0
    """0: the donor is exact. Else it was computed behind moved text, which itself was moved from
    donors of the generation before."""
    shared: int = 0
    """Tokens of it that are read where the donor has them; the others were copied."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prompt tokens by where their KV comes from; the others are computed from nothing."""

    exact: int = 0
    moved: int = 0
    paraphrase: int = 0
    recomputed: int = 0
    """Inside spans, but computed again; not counted in `moved` or `paraphrase`."""
    session: int = 0
    """Of `moved`: from KV that is itself approximate, which only its own session is lent."""
    shared: int = 0
    """Of `moved`: read in the donor's pages instead of copied."""

    def __add__(self, other: Reuse) -> Reuse:
        return Reuse(
            self.exact + other.exact,
            self.moved + other.moved,
            self.paraphrase + other.paraphrase,
            self.recomputed + other.recomputed,
            self.session + other.session,
            self.shared + other.shared,
        )


def _no_positions() -> IntArray:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class DeferredRecompute:
    """`budget` further moved tokens to compute again, which the forward pass selects.

    `strategy` names the rule of selection (fuzzy.recompute.STRATEGIES).
    """

    strategy: str
    budget: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Covers every position once: `[0, exact)` from the tree, then spans, the rest fresh.

    `recompute` lists positions inside spans that are computed although donor KV exists; with
    `deferred`, the forward pass selects more. `compute` holds all positions that enter the forward
    pass, ascending: fresh, recomputed and, with `deferred`, all moved ones.
    Immutable; a plan that does not add up raises IntegrityError when built.
    """

    length: int
    exact: int = 0
    spans: tuple[Span, ...] = ()
    recompute: IntArray = field(default_factory=_no_positions)
    deferred: DeferredRecompute | None = None
    compute: IntArray = field(init=False)
    candidates: BoolArray | None = field(init=False)
    """With `deferred`: which of `compute` are served unless the forward pass selects them."""

    def __post_init__(self) -> None:
        self._check()
        compute, candidates = np.arange(self.exact, self.length, dtype=np.int32), None
        if self.spans:
            fresh = self._fresh()
            entering = fresh if self.deferred is None else fresh | self._covered(Tier.MOVED)
            compute = np.flatnonzero(entering).astype(np.int32)
            if self.deferred is not None:
                candidates = ~fresh[compute]
                candidates.setflags(write=False)
        compute.setflags(write=False)
        object.__setattr__(self, "compute", compute)
        object.__setattr__(self, "candidates", candidates)

    def _fresh(self) -> BoolArray:
        """By position: what is sure to be computed."""
        mask = ~self._covered(*Tier)
        mask[: self.exact] = False
        mask[self.recompute] = True
        return mask

    def _covered(self, *tiers: Tier) -> BoolArray:
        """By position: what lies in spans of these tiers."""
        mask = np.zeros(self.length, np.bool_)
        for span in self.spans:
            if span.tier in tiers:
                mask[span.start : span.end] = True
        return mask

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
        if self.deferred is not None and (
            self.deferred.budget < 1 or self.served_by(Tier.MOVED) < 0
        ):
            raise IntegrityError(f"{self.deferred.budget} tokens are to be chosen of too few")

    @property
    def served(self) -> int:
        """Tokens that spans serve and that are not recomputed, without the exact prefix."""
        return sum(span.length for span in self.spans) - self.recomputed

    def served_by(self, tier: Tier) -> int:
        """Tokens that spans of one tier serve and that are not recomputed."""
        served = self._served(span for span in self.spans if span.tier is tier)
        return served - self.deferred.budget if self.deferred and tier is Tier.MOVED else served

    def _served(self, spans: Iterable[Span]) -> int:
        """Tokens of `spans` that the plan does not list to be recomputed."""
        edges = np.array([(span.start, span.end) for span in spans], np.int64).reshape(-1, 2)
        recomputed = np.diff(np.searchsorted(self.recompute, edges), axis=1)
        return int(np.diff(edges, axis=1).sum() - recomputed.sum())

    @property
    def reuse(self) -> Reuse:
        """All of this, counted."""
        moved, paraphrase = self.served_by(Tier.MOVED), self.served_by(Tier.PARAPHRASE)
        # What the forward pass will recompute is not known yet; it may be of any span.
        session = min(moved, self._served(span for span in self.spans if span.generation))
        shared = sum(span.shared for span in self.spans)
        return Reuse(self.exact, moved, paraphrase, self.recomputed, session, shared)

    @property
    def recomputed(self) -> int:
        """Tokens of spans that are computed again."""
        return len(self.recompute) + (0 if self.deferred is None else self.deferred.budget)

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
