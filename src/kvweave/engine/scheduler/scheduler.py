"""The scheduler: continuous batching over plans and leases.

Every step is a packed mix of decodes, one token each, and chunks of prompts under one budget of
tokens. The scheduler reads from a plan what is left to compute, and decides when to publish; it
does not depend on the kind of prefix cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvweave.config import SchedulerConfig
from kvweave.engine.scheduler.admission import Admission, WaitingQueue
from kvweave.engine.scheduler.drafts import Drafter
from kvweave.engine.scheduler.request import Sequence, Status
from kvweave.errors import IntegrityError, RequestError
from kvweave.prefix.contract import PrefixCache
from kvweave.prefix.lease import Lease

logger = logging.getLogger("kvweave.engine")

SCORED_CHUNK = 128
"""Longest chunk of a prompt whose log probabilities are wanted: every token needs its logits."""


@dataclass(slots=True)
class Row:
    """The next `count` positions of `sequence`, computed in one forward pass."""

    sequence: Sequence
    count: int
    prefill: bool
    """Part of a plan; else a decode, which is one sampled token."""
    completes: bool
    """Nothing remains to compute afterwards: the next token can be sampled."""
    draft: tuple[int, ...] = ()
    """Proposals for the tokens after the sequence's last, the last of the row's positions."""


@dataclass(slots=True)
class Step:
    """What one step runs (decodes first), and what happened while it was planned."""

    rows: list[Row] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Ended already, each by an error of its own."""
    preempted: int = 0


class StoredKV(Protocol):
    """Reads KV back into the cache for requests that wait."""

    @property
    def leases(self) -> list[Lease]:
        """What it holds meanwhile."""

    def awaited(self, rid: str) -> bool:
        """Whether the request of this id should wait for it."""

    def give_way(self) -> bool:
        """Release a lease, though what waits for it will compute more; False if there is none."""


class Scheduler:
    """Owns the waiting and the running sequences.

    The order among sequences is total (priority, then arrival), the victim of a preemption is
    always the last in it, the asking one included, and a preempted one keeps its place. So the
    first of all never loses its pages, finishes, and hands the place on: two sequences never evict
    each other for ever.
    """

    def __init__(
        self, cache: PrefixCache, config: SchedulerConfig, drafter: Drafter | None = None
    ) -> None:
        self.waiting = WaitingQueue("lpm" if config.schedule_policy == "lpm" else "fcfs")
        self.running: list[Sequence] = []
        self._cache = cache
        self._config = config
        self.store: StoredKV | None = None
        self._admission = Admission(cache)
        self._drafter = drafter
        self._step = Step()
        self._budget = 0
        self._owed: list[Lease] = []
        """Leases of ended sequences whose release failed; each step tries again."""

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def schedule(self) -> Step:
        """Decide what the next step computes, and take the pages for it.

        Sequences are admitted and preempted; one that meets an error ends, and is in `Step.failed`.
        Nothing is computed or published yet: `commit` says what was.
        """
        self.settle()
        self._step = Step()
        self._budget = self._config.chunked_prefill_size
        self._admission.stepped()
        self._continue(sequence for sequence in self.running if sequence.decoding)
        prefills = [sequence for sequence in self.running if not sequence.decoding]
        prefills.sort(key=lambda sequence: sequence.rank)
        first = self.waiting.first
        outranked = [s for s in prefills if first is not None and s.priority < first.priority]
        self._continue(prefills[: len(prefills) - len(outranked)])
        if outranked:
            self._admit(above=outranked[0].priority)
            self._continue(outranked)
        self._admit()
        if self._drafter is not None:
            self._draft(self._drafter)
        return self._step

    def commit(self, row: Row) -> None:
        """The row's KV is computed, its draft's left aside: progress counts, and full pages are
        published."""
        self._progress(row.sequence, row.count - len(row.draft))

    def commit_draft(self, row: Row, accepted: int) -> None:
        """The first `accepted` tokens of the row's draft are the sequence's now, and their KV is
        there. That of the others will be overwritten."""
        if accepted:
            self._progress(row.sequence, accepted)
        if row.draft and self._drafter is not None:
            self._drafter.verified(row.sequence, len(row.draft), accepted)

    def took(self, seconds: float) -> None:
        """How long the step took that was planned last."""
        rows = self._step.rows
        if self._drafter is not None and not any(row.prefill for row in rows):
            self._drafter.cost.observe(sum(row.count for row in rows), seconds)

    def _progress(self, sequence: Sequence, count: int) -> None:
        lease = sequence.lease
        assert lease is not None
        sequence.done += count
        if sequence.decoding:
            sequence.group.prompt_computed = True
        frontier = sequence.frontier
        shareable = lease.plan.publishable(frontier)
        # Most decodes do not complete a page: they cost a comparison here, not a call.
        if shareable - sequence.offered >= self._cache.page_size:
            sequence.offered = shareable // self._cache.page_size * self._cache.page_size
            self._cache.publish(lease, sequence.tokens, computed=frontier)

    def end(self, sequence: Sequence) -> None:
        """Take the sequence out, wherever it is, and give its pages back. Twice is harmless."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        self._release(sequence, Status.FINISHED)
        if self._drafter is not None:
            self._drafter.forget(sequence)

    def retain(self, sequence: Sequence) -> None:
        """The sequence has ended well, its lease still held: offer its KV to its session."""
        lease = sequence.lease
        if lease is not None and lease.session is not None and not sequence.index:
            self._cache.retain(lease, sequence.tokens, sequence.frontier)

    def give_back(self, lease: Lease) -> None:
        """Release `lease`. A failure is logged, and releasing is tried again in the next step."""
        try:
            self._cache.release(lease)
        except Exception:
            logger.error("pages were not given back; trying again", exc_info=True)
            self._owed.append(lease)

    def settle(self) -> None:
        """Try again what could not be released."""
        owed, self._owed = self._owed, []
        for lease in owed:
            self.give_back(lease)

    def sequences(self) -> Iterator[Sequence]:
        """All that are alive."""
        yield from self.running
        yield from self.waiting

    def check(self) -> None:
        """Prove that pages, owners and queues add up; IntegrityError if not."""
        for sequence in self.running:
            if sequence.status is not Status.RUNNING or sequence.lease is None:
                raise IntegrityError(f"{sequence.group.request.rid} runs without a lease")
        for sequence in self.waiting:
            if sequence.status is not Status.WAITING or sequence.lease is not None:
                raise IntegrityError(f"{sequence.group.request.rid} waits, but holds a lease")
        alive = list(self.sequences())
        if len({id(sequence) for sequence in alive}) != len(alive):
            raise IntegrityError("a sequence is queued twice")
        held = [s.lease for s in self.running if s.lease is not None]
        if self.store is not None:
            held += self.store.leases
        self._cache.inspector.check(held + self._owed)

    def _continue(self, sequences: Iterable[Sequence]) -> None:
        """Plan the next positions of running sequences, as far as the step's budget goes."""
        # A prompt needs budget to become a decode, so there are never more decodes than budget.
        for sequence in list(sequences):
            if self._budget == 0:
                return
            if sequence.status is not Status.RUNNING:
                continue  # preempted in this step
            try:
                count = self._chunk(sequence)
                if count and self._make_room(sequence, count):
                    self._run(sequence, count)
            except Exception as error:
                self._fail(sequence, error)

    def _admit(self, above: int | None = None) -> None:
        """Start waiting sequences, all or those of a priority higher than `above`."""
        if not self._may_admit():
            return  # before anything is looked up in the cache
        for sequence, matched in self.waiting.candidates(self._match):
            if above is not None and sequence.priority <= above:
                return
            try:
                if self.store is not None and self.store.awaited(sequence.group.request.rid):
                    continue  # others may pass
                if self._admission.awaits_producer(sequence, matched):
                    continue
                if not (self._make_way(sequence, matched) and self._start(sequence, matched)):
                    return  # smaller ones do not pass: the large would starve
            except Exception as error:
                self._fail(sequence, error)
            if not self._may_admit():
                return

    def _may_admit(self) -> bool:
        """Whether a waiting sequence may start in this step: cheap, asked in every step."""
        first = self.waiting.first
        if self._budget == 0 or first is None:
            return False
        return len(self.running) < self._config.max_running_requests or any(
            sequence.priority < first.priority for sequence in self.running
        )

    def _make_way(self, sequence: Sequence, matched: int) -> bool:
        """Whether there is a place and room for `sequence`, once lower priorities are preempted.

        As few as needed go, the last in rank first, and none if that would not be enough. Equal
        priorities are never preempted here, so two sequences do not evict each other for ever.
        """
        staying = sorted(self.running, key=lambda other: other.rank)
        victims: list[Sequence] = []
        while not self._fits(sequence, matched, staying, victims):
            if not staying or staying[-1].priority >= sequence.priority:
                return False
            victims.append(staying.pop())
        for victim in victims:
            self._preempt(victim)
        return True

    def _fits(
        self, sequence: Sequence, matched: int, staying: list[Sequence], victims: list[Sequence]
    ) -> bool:
        """Whether `sequence` may run beside `staying`, with what `victims` hold given back."""
        if not staying:
            return True  # then everything that is cached can be evicted
        freed = sum(len(victim.lease.pages) for victim in victims if victim.lease is not None)
        return len(staying) < self._config.max_running_requests and self._admission.may_fit(
            sequence, matched, staying, freed
        )

    def _start(self, sequence: Sequence, matched: int) -> bool:
        """Lease and run the first chunk; False if there was no room or no budget for it."""
        alone = not self.running
        lease = self._cache.lease(sequence.view())
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.start(lease)
        count = self._chunk(sequence)
        lacking = 0 if alone else self._admission.lacking(sequence, self.running)
        if lacking > 0 or not self._grow(lease, sequence.last_position(max(count, 1)) + 1):
            if alone:
                self._stop_sharing_or_fail(sequence)
            self._requeue(sequence)
            self._admission.hold_back(sequence, matched, self.running, max(lacking, 1))
            return False
        if not sequence.group.admitted:
            sequence.group.count_reuse(lease.plan)
            self._cache.record(lease)
        self.waiting.admissions += 1
        self._step.admitted.append(sequence)
        if count:
            self._run(sequence, count)
        return count > 0

    def _match(self, sequence: Sequence) -> int:
        try:
            return self._cache.match(sequence.view())
        except Exception:
            return 0  # an order of admission needs a number; leasing meets the same fault again

    def _chunk(self, sequence: Sequence) -> int:
        """How many positions of `sequence` this step computes; 0: they wait for the next one."""
        if sequence.scores_prompt:
            return min(sequence.remaining, self._budget, SCORED_CHUNK)
        count = sequence.chunk(self._budget, self._config.chunked_prefill_size)
        if count > self._budget and any(row.prefill for row in self._step.rows):
            return 0  # the first prompt of a step may exceed its budget, by as many as decode
        return count

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Get pages for the next `count` positions, by preempting; False if it is preempted."""
        assert sequence.lease is not None
        while not self._grow(sequence.lease, sequence.last_position(count) + 1):
            victim = max(self.running, key=lambda other: other.rank)
            if len(self.running) == 1:
                self._stop_sharing_or_fail(sequence)
            self._preempt(victim)
            self._admission.preempted()
            if victim is sequence:
                return False
        return True

    def _grow(self, lease: Lease, tokens: int) -> bool:
        """As the cache does; what runs comes before what is read for a request that waits."""
        return self._cache.grow(lease, tokens) or (
            self.store is not None and self.store.give_way() and self._cache.grow(lease, tokens)
        )

    def _stop_sharing_or_fail(self, sequence: Sequence) -> None:
        """Alone, `sequence` lacks pages: next time it copies what it shares now, so that donors can
        be evicted. RequestError if it shares nothing: the pool is too small for it."""
        if sequence.lease is None or not sequence.lease.shared:
            raise _too_small(self._cache)
        sequence.share_spans = False

    def _run(self, sequence: Sequence, count: int) -> None:
        row = Row(sequence, count, not sequence.decoding, sequence.remaining == count)
        self._step.rows.append(row)
        self._budget = max(0, self._budget - count)

    def _draft(self, drafter: Drafter) -> None:
        """Let decodes carry drafts, with what all rows of the step leave of budget and pages."""
        decodes = [row for row in self._step.rows if not row.prefill]
        for row in decodes:
            sequence, lease = row.sequence, row.sequence.lease
            assert lease is not None
            most = min(self._budget, sequence.limit - sequence.length - 1)
            draft = drafter.propose(sequence, most, len(decodes))
            if not draft:
                continue
            own = lease.own_slot(sequence.length)
            room = len(lease.pages) * self._cache.page_size - own
            if len(draft) > room and not self._cache.grow(lease, sequence.length + len(draft)):
                draft = draft[:room]
            row.draft = draft
            row.count += len(draft)
            self._budget -= len(draft)

    def _preempt(self, victim: Sequence) -> None:
        """Take the victim's pages; it computes prompt and output again when there is room."""
        self._drop_row(victim)
        self._requeue(victim)
        self._step.preempted += 1

    def _requeue(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence, Status.WAITING)
        self.waiting.add(sequence)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self._drop_row(sequence)
        self.end(sequence)
        self._step.failed.append((sequence, error))

    def _drop_row(self, sequence: Sequence) -> None:
        for row in [row for row in self._step.rows if row.sequence is sequence]:
            self._step.rows.remove(row)
            self._budget += row.count

    def _release(self, sequence: Sequence, status: Status) -> None:
        lease = sequence.lease
        sequence.stop(status)
        if lease is not None:
            self.give_back(lease)


def _too_small(cache: PrefixCache) -> RequestError:
    slots = cache.pool.num_pages * cache.page_size
    return RequestError(
        f"the KV pool of {slots} tokens is too small for this request, even alone", status=503
    )
