"""A request as a cache sees it, its plan, and the lease that it holds on pages of the cache.

A plan says where the KV of every prompt position comes from. It is all that the scheduler needs to
know about reuse: which positions are served and which have to be computed. Exact backends give
`exact | fresh`; fuzzy ones weave spans in between.

Owners of a prompt's pages, by token range, and when they are freed (pages of 4 tokens):

    position   0          8             16              20        23
    tokens     | exact    | published   | not published | output ->
    pages      [ p0 ][ p1 ][ p2 ][ p3 ] [ p4 ]           [ p5 ]
    owners     cache+lease cache+lease   lease only       lease only
               `--- path in the tree ---' `-- computed into here --'
    release    drops the lease's claim on all of them: p4 and p5 are free at once,
    evict      frees p0 to p3 later, from the tail, once no lease holds them.

    Behind a span (moved or paraphrased KV) nothing is published: those pages are the lease's only.
    Donor pages are `pinned` while they are copied. Those that a span reads where they lie
    have the lease as an owner, and are pinned, until it is released. Its own pages hold the other
    positions without a gap (pages of 16 tokens):

    position   64      74             90                   206
    tokens     | fresh | moved: seam  | moved: shared      | fresh ->
    own slot   64      74                                  90       96
    pages      [ p4        ][ p5                             p5     ][ p6 ->
    donor                             [ d7 ][ d8 ] .. [ d14 ]
    shared     SharedSpan(90, 206, [d7 .. d14], slot, delta)

No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvweave.errors import IntegrityError
from kvweave.kv.journal import Journal
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

    `donor` is the number of the donor's tree node; with a `generation`, of a session's segment.
    Positions are absolute: `start` in the recipient's prompt, `donor_start` in the donor's.
    """

    start: int
    length: int
    donor: int
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

    def publishable(self, computed: int) -> int:
        """How many of the first `computed` tokens, output included, have exact KV: others may use
        these. Nothing is from the first span on."""
        return min(computed, self.spans[0].start) if self.spans else computed

    def frontier(self, done: int) -> int:
        """All positions below the result have KV once the first `done` of `compute` have run."""
        return int(self.compute[done]) if done < len(self.compute) else self.length


@dataclass(frozen=True, slots=True)
class Namespace:
    """Two requests share KV only if their namespaces are equal.

    Typed fields, never one joined string: ("ab", "c") is not ("a", "bc"), and no salt is not "".
    `model` names identity, revision, dtype and KV layout.
    """

    model: str
    adapter: str | None = None
    salt: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RequestView:
    """The part of a request that a cache sees.

    `tokens` (int32) are all tokens known so far: the prompt, and the output too when a preempted
    request comes back. `max_exact` bounds the exact prefix in tokens (0: compute everything, as
    prompt logprobs need); None leaves it to the cache. `fuzzy` False forbids anything approximate;
    `recompute_share` of it is computed again, None: the configured share. From position
    `protected_from` on, where the last question begins, nothing may be served in other words; None:
    nobody knows where that is, and the cache is careful. `semantic` False forbids to compare its
    meaning with anybody's, now or later. Requests of one `session` may lend each other what they
    computed behind moved text. What the request used and published outlives other pages by
    `retain_seconds`. `share_spans` False has moved text copied that could be read where it lies.
    """

    rid: str
    tokens: IntArray
    namespace: Namespace
    priority: int = 0
    max_exact: int | None = None
    fuzzy: bool = True
    protected_from: int | None = None
    recompute_share: float | None = None
    semantic: bool = True
    session: str | None = None
    retain_seconds: float = 0.0
    share_spans: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class SharedSpan:
    """Positions [start, end) whose KV is read where a donor has it.

    `pages` (distinct, int32) hold the donor's tokens; that of position `start` is slot `slot`,
    counted from the first slot of `pages[0]`. Its keys are those of position `start - delta`.
    """

    start: int
    end: int
    pages: IntArray
    slot: int
    delta: int


class Lease:
    """A request's claim on pages and on a place in the cache.

    `pages[i]` holds positions `[i * page_size, (i + 1) * page_size)`, counted without those in
    `shared` runs: see `own_slot`. It is the only block table there is. Read page ids here in the
    step that uses them: publishing may replace pages by canonical ones. Backends subclass it and
    add their own state.
    """

    __slots__ = (
        "_buffer",
        "_length",
        "namespace",
        "plan",
        "priority",
        "published",
        "retain_seconds",
        "rid",
        "semantic",
        "session",
        "shared",
    )

    def __init__(self, view: RequestView, plan: Plan, pages: IntArray) -> None:
        self.rid = view.rid
        self.namespace = view.namespace
        self.priority = view.priority
        self.semantic = view.semantic
        self.session = view.session
        self.retain_seconds = view.retain_seconds
        self.plan = plan
        self.published = plan.exact
        """Tokens already handed to the cache (or taken from it); a multiple of the page size."""
        self.shared: tuple[SharedSpan, ...] = ()
        """Ascending; the lease is an owner of their pages, too."""
        self._buffer = np.empty(max(16, 2 * len(pages)), np.int32)
        self._buffer[: len(pages)] = pages
        self._length = len(pages)

    @property
    def pages(self) -> IntArray:
        """A view, valid until the next call that grows, publishes or releases."""
        return self._buffer[: self._length]

    def own_slot(self, position: int) -> int:
        """Where `pages` hold a position in no shared run, in slots from the first page's first.

        That is also how many slots the positions before it need.
        """
        if not self.shared:
            return position
        return position - sum(
            min(run.end, position) - run.start for run in self.shared if run.start < position
        )

    def own_slots(self, positions: IntArray) -> IntArray:
        """`own_slot` of many."""
        slots = positions
        for run in self.shared:
            slots = slots - (positions >= run.end) * np.int32(run.end - run.start)
        return slots

    def owned(self) -> Iterator[IntArray]:
        """The pages that the lease is an owner of, in groups of distinct ones."""
        yield self.pages
        for run in self.shared:
            yield run.pages

    def keep(self, journal: Journal) -> None:
        """For caches only: the lease is about to change, in any way."""
        journal.fields(self, "_buffer", "_length", "plan", "published", "shared")

    def append(self, pages: IntArray) -> None:
        """For caches only: add owned pages behind the last."""
        need = self._length + len(pages)
        if need > len(self._buffer):
            grown = np.empty(max(need, 2 * len(self._buffer)), np.int32)
            grown[: self._length] = self.pages
            self._buffer = grown
        self._buffer[self._length : need] = pages
        self._length = need

    def replace(self, first: int, pages: IntArray) -> None:
        """For caches only: converge to canonical pages from index `first` on."""
        buffer = self._buffer.copy()
        buffer[first : first + len(pages)] = pages
        self._buffer = buffer

    def truncate(self, length: int) -> None:
        """For caches only: forget all but the first `length` pages."""
        self._length = length

    def clear(self) -> None:
        """For caches only: the lease holds nothing any more."""
        self._length, self.shared = 0, ()
