"""Session donors: KV that a session computed behind moved text, lent to that session only.

A request that was served moved text publishes nothing of what it computed behind it. If it belongs
to a session, that KV may still serve the session's later requests, each token from where it was
computed and never moved twice:

    turn 2   head │ document (moved) │ question 2, answer 2 (computed: a segment)
    turn 3   another head │ document (moved) │ question 2, answer 2 (moved) │ question 3, answer 3

A segment is never an exact hit, never a donor for anyone else, and leaves the cache before exact
KV of the same age.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from kvweave.errors import IntegrityError
from kvweave.fuzzy.anchors import AnchorTable
from kvweave.fuzzy.donors import slots_of
from kvweave.fuzzy.matcher import (
    anchors_of,
    run_around,
    runs_through,
    window_hashes,
)
from kvweave.fuzzy.provider import Candidate
from kvweave.kv.journal import atomic
from kvweave.kv.pool import IntArray, PagePool
from kvweave.prefix.eviction import Key
from kvweave.prefix.hash_index import namespace_seed
from kvweave.prefix.lease import Lease, Namespace, Plan, RequestView

SessionKey: TypeAlias = tuple[Namespace, str]


@dataclass(slots=True, eq=False)
class Segment:
    """Positions `first` to `end` of a request's tokens, whose KV was computed in that request."""

    session: SessionKey
    rid: str
    number: int
    text: IntArray
    """All tokens of the request up to `end` at least: int32, shared by its segments."""
    first: int
    end: int
    pages: IntArray
    """int32; `pages[0]` holds position `first`, in its slot number `slot`."""
    slot: int
    generation: int
    """1 behind text moved from exact donors, else 1 more than the donors' own."""
    used: Key

    @property
    def request(self) -> tuple[Namespace, str]:
        """The request that computed it."""
        return self.session[0], self.rid


@dataclass(frozen=True, slots=True)
class SessionCandidate(Candidate):
    """A verified run of a segment; `page` is the segment's page of the run's last token."""

    segment: Segment = field(kw_only=True, compare=False, repr=False)


@dataclass(slots=True)
class _Session:
    segments: dict[int, Segment] = field(default_factory=dict)
    used: float = 0.0


class SessionDonors:
    """All segments, by session. Owns their pages; belongs to the engine's thread."""

    def __init__(
        self,
        pool: PagePool,
        stride: int,
        shortest: int,
        idle_seconds: float,
        most_generations: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shortest`: tokens of a segment worth keeping; `most_generations`: 0 for no bound."""
        self._pool = pool
        self._stride = stride
        self._shortest = max(shortest, 2 * stride - 1)
        self._idle_seconds = idle_seconds
        self._most_generations = most_generations
        self._clock = clock
        self._anchors = AnchorTable(pool.num_pages * pool.page_size, pool.page_size, stride)
        self._sessions: dict[SessionKey, _Session] = {}
        self._segments: dict[int, Segment] = {}
        """By number."""
        self._by_request: dict[tuple[Namespace, str], tuple[Segment, ...]] = {}
        self._at_page: dict[int, Segment] = {}
        self._made = 0
        self._held: dict[Lease, Sequence[Segment]] = {}
        """Segments whose KV is being copied, by the lease that it is copied for."""
        self._journal = pool.journal

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def pages(self) -> int:
        """Pages that segments own."""
        return len(self._at_page)

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could give up now; shared ones become free later."""
        return self.pages - sum(len(each.pages) for each in self._in_use())

    def resident(self) -> Iterator[IntArray]:
        """The pages of each segment."""
        return (segment.pages for segment in self._segments.values())

    # Keeping.

    @atomic
    def keep(self, lease: Lease, tokens: IntArray, computed: int, used: Key) -> int:
        """Keep what the lease's request computed of `tokens[:computed]` behind moved text.

        Returns how many tokens. `used` is the eviction key of what is used now.
        """
        if lease.session is None or not lease.plan.approximate:
            return 0
        generation = 1 + max((span.generation for span in lease.plan.spans), default=0)
        if self._most_generations and generation > self._most_generations:
            return 0
        text = tokens[:computed].copy()
        text.setflags(write=False)
        size, kept, free_from = self._pool.page_size, 0, 0
        for first, end in _computed_runs(lease.plan, computed):
            own = lease.own_slot(first)
            begin = max(own, free_from)
            first += begin - own
            if end - first < self._shortest:
                continue
            page, slot = divmod(begin, size)
            pages = lease.pages[page : -(-(begin + end - first) // size)].copy()
            session = lease.namespace, lease.session
            self._made += 1
            self._add(
                Segment(
                    session, lease.rid, self._made, text, first, end, pages, slot, generation, used
                )
            )
            kept += end - first
            free_from = (page + len(pages)) * size  # a page names one segment
        return kept

    def _add(self, segment: Segment) -> None:
        journal, pages = self._journal, segment.pages.tolist()
        self._pool.share(segment.pages)
        journal.keys(self._sessions, segment.session)
        session = self._sessions.setdefault(segment.session, _Session())
        session.used = self._clock()
        journal.keys(session.segments, segment.number)
        session.segments[segment.number] = segment
        journal.keys(self._segments, segment.number)
        self._segments[segment.number] = segment
        journal.keys(self._by_request, segment.request)
        self._by_request[segment.request] = (*self._by_request.get(segment.request, ()), segment)
        journal.keys(self._at_page, *pages)
        self._at_page.update(dict.fromkeys(pages, segment))
        journal.after_undo(self._anchors.close, segment.pages)
        self._anchor(segment)

    def _anchor(self, segment: Segment) -> None:
        size, text = self._pool.page_size, segment.text[segment.first : segment.end]
        hashes, ends = anchors_of(text, 0, 0, self._stride, self._seed(segment.session))
        ends += segment.slot
        self._anchors.open(hashes, segment.pages[ends // size] * np.int32(size) + ends % size)

    # Finding.

    def find(self, view: RequestView, exact: int, seconds: float) -> list[SessionCandidate]:
        """Runs of the prompt behind its first `exact` tokens that the session's segments hold."""
        session = self._sessions.get((view.namespace, view.session)) if view.session else None
        if session is None:
            return []
        session.used = self._clock()
        windows = window_hashes(
            view.tokens[exact:], self._stride, self._seed((view.namespace, str(view.session)))
        )
        offsets, anchors = self._anchors.probe(windows)
        offsets += exact

        def longest_at(hit: int) -> SessionCandidate | None:
            offset = int(offsets[hit])
            last = offset + self._stride - 1
            return self._anchors.longest_run(
                int(anchors[hit]), offset, lambda slot: self._run_around(view, last, slot)
            )

        return runs_through(offsets, self._stride, longest_at, seconds)

    def _run_around(self, view: RequestView, position: int, slot: int) -> SessionCandidate | None:
        """The longest equal run in which the prompt's `position` meets a slot of a segment."""
        page, within = divmod(slot, self._pool.page_size)
        segment = self._at_page[page]
        if segment.session != (view.namespace, view.session):
            return None  # two sessions whose blocks have the same hash
        size = self._pool.page_size
        index = int(np.flatnonzero(segment.pages == page)[0])
        text = segment.text[segment.first : segment.end]
        run = run_around(view.tokens, position, text, index * size + within - segment.slot)
        if not run.length:
            return None
        donor_start = segment.first + run.donor_start
        last = segment.pages[(segment.slot + run.donor_start + run.length - 1) // size]
        return SessionCandidate(run.start, run.length, int(last), donor_start, segment=segment)

    def slots(self, run: SessionCandidate) -> IntArray:
        """The slots of a run, in order: int32 (length)."""
        segment = run.segment
        first = segment.slot + run.donor_start - segment.first
        return slots_of(segment.pages, self._pool.page_size, first, first + run.length)

    # Holding and giving up.

    def hold(self, lease: Lease, segments: Sequence[Segment]) -> None:
        """Keep these segments until `let_go`."""
        if segments:
            self._held[lease] = segments

    def let_go(self, lease: Lease) -> None:
        """The lease holds no segments any more; harmless if it held none."""
        self._held.pop(lease, None)

    def _in_use(self) -> set[Segment]:
        return {segment for segments in self._held.values() for segment in segments}

    def touch(self, number: int, used: Key) -> None:
        """The segment was used just now; harmless if it is gone."""
        segment = self._segments.get(number)
        if segment is not None:
            self._journal.fields(segment, "used")
            segment.used = used

    def oldest(self) -> Segment | None:
        """The segment with the smallest eviction key, of those that no lease holds."""
        in_use = self._in_use()
        free = (each for each in self._segments.values() if each not in in_use)
        return min(free, key=lambda each: each.used, default=None)

    @atomic
    def drop(self, segment: Segment) -> int:
        """Forget a segment that no lease holds; returns how many pages became free."""
        if segment in self._in_use():
            raise IntegrityError(f"segment {segment.number} was dropped while it is held")
        journal, session = self._journal, self._sessions[segment.session]
        pages = segment.pages.tolist()
        journal.keys(self._at_page, *pages)
        for page in pages:
            del self._at_page[page]
        journal.keys(session.segments, segment.number)
        del session.segments[segment.number]
        if not session.segments:
            journal.keys(self._sessions, segment.session)
            del self._sessions[segment.session]
        journal.keys(self._segments, segment.number)
        del self._segments[segment.number]
        journal.keys(self._by_request, segment.request)
        others = tuple(each for each in self._by_request.pop(segment.request) if each != segment)
        if others:
            self._by_request[segment.request] = others
        journal.after_undo(self._anchor, segment)
        self._anchors.close(segment.pages)
        return self._pool.drop(segment.pages)

    def close(self, session: SessionKey) -> int:
        """Forget a session; returns its tokens. Segments in use go when they are given back."""
        return self._drop_all(list(self._of(session)))

    def healed(self, namespace: Namespace, rid: str, tokens: int) -> None:
        """The first `tokens` of request `rid` are exact by now: what they hold is not needed."""
        kept = self._by_request.get((namespace, rid), ())
        self._drop_all([each for each in kept if each.end <= tokens])

    def expire(self) -> None:
        """Forget the sessions that have been idle for too long."""
        before = self._clock() - self._idle_seconds
        for session in [key for key, each in self._sessions.items() if each.used < before]:
            self.close(session)

    def clear(self) -> None:
        """Forget everything."""
        self._drop_all(list(self._segments.values()))

    def _drop_all(self, segments: Iterable[Segment]) -> int:
        tokens = 0
        for segment in segments:
            if segment not in self._in_use():
                tokens += segment.end - segment.first
                self.drop(segment)
        return tokens

    def _of(self, session: SessionKey) -> Iterable[Segment]:
        found = self._sessions.get(session)
        return found.segments.values() if found is not None else ()

    def _seed(self, session: SessionKey) -> int:
        namespace, key = session
        salted = Namespace(namespace.model, namespace.adapter, repr((namespace.salt, key)))
        return namespace_seed(salted)

    # Proving.

    def check(self) -> None:
        """Recompute all counts; IntegrityError where one differs."""
        self._anchors.check()
        grouped = [each for group in self._sessions.values() for each in group.segments.values()]
        pages = [page for each in grouped for page in each.pages.tolist()]
        problems = {
            "sessions": {id(each) for each in grouped}
            != {id(each) for each in self._segments.values()},
            "requests": {id(each) for group in self._by_request.values() for each in group}
            != {id(each) for each in grouped},
            "pages": sorted(pages) != sorted(self._at_page),
            "held segments": not self._in_use() <= set(grouped),
        }
        wrong = [name for name, is_wrong in problems.items() if is_wrong]
        if wrong:
            raise IntegrityError(f"the session donors are wrong in {', '.join(wrong)}")


def _computed_runs(plan: Plan, computed: int) -> Iterator[tuple[int, int]]:
    """Runs of positions below `computed` that no span serves, behind the first span; ascending.

    What stands before it is exact, and published page by page.
    """
    at = plan.spans[0].end
    for span in plan.spans[1:]:
        if at < span.start:
            yield at, min(span.start, computed)
        at = span.end
    if at < computed:
        yield at, computed
