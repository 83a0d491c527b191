"""A request as a cache sees it, and the lease that it holds on pages of the cache.

Owners of a prompt's pages, by token range, and when they are freed (pages of 4 tokens):

    position   0          8             16              20        23
    tokens     | exact    | published   | not published | output ->
    pages      [ p0 ][ p1 ][ p2 ][ p3 ] [ p4 ]           [ p5 ]
    owners     cache+lease cache+lease   lease only       lease only
               `--- path in the tree ---' `-- computed into here --'
    release    drops the lease's claim on all of them: p4 and p5 are free at once,
    evict      frees p0 to p3 later, from the tail, once no lease holds them.

    Behind a span (moved or paraphrased KV) nothing is published: those pages are the lease's only.
    Donor pages are `pinned` while they are copied. Those that a long span reads where they lie
    have the lease as an owner, and are pinned, until it is released:

    position   64         80                        208     214
    tokens     | fresh    | moved: seam | shared    | moved | fresh ->
    pages      [ p4 ]     [ p5 ][ p6 ]  - - - - - - [ p13 ] [ p13 ]
    donor                               d7 d8 .. d14
    shared     SharedSpan(112, 208, [d7 .. d14], slot, delta)

No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvweave.kv.journal import Journal
from kvweave.kv.pool import IntArray
from kvweave.prefix.plan import Plan

HOLE = -1
"""In a block table: no page."""


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
    `recompute` is the share of it to compute again, None the configured one. From position
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
    recompute: float | None = None
    semantic: bool = True
    session: str | None = None
    retain_seconds: float = 0.0
    share_spans: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class SharedSpan:
    """Positions [start, end), in whole pages, whose KV is read where a donor has it.

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

    `pages[i]` holds positions `[i * page_size, (i + 1) * page_size)`, or is HOLE where these lie in
    one of the `shared` runs. It is the only block table there is. Read page ids here in the step
    that uses them: publishing may replace pages by canonical ones. Backends subclass it and add
    their own state.
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

    @property
    def held(self) -> int:
        """Pages of the block table, without holes."""
        return int(np.count_nonzero(self.pages != HOLE)) if self.shared else self._length

    def owned(self) -> Iterator[IntArray]:
        """The pages that the lease is an owner of, in groups of distinct ones."""
        pages = self.pages
        yield pages[pages != HOLE] if self.shared else pages
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
