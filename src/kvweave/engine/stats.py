"""Statistics of an engine: counters, snapshots, and a log line per prefill batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from kvweave.engine.heal import Healer
from kvweave.engine.scheduler.request import Sequence
from kvweave.engine.scheduler.scheduler import Scheduler, Step
from kvweave.engine.types import EngineSnapshot, FinishReason
from kvweave.prefix.contract import PrefixCache
from kvweave.prefix.events import EventSink
from kvweave.store.offloader import Offloader

logger = logging.getLogger("kvweave.engine")

_DECODE_LINE_STEPS = 40
"""Steps without prompts between two log lines."""


@dataclass
class Counters:
    """Since start, by EngineSnapshot's names."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    prefill_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def sampled(self, drafted: int, accepted: int) -> None:
        """A row got its token, and `accepted` of `drafted` more."""
        self.generated_tokens += 1 + accepted
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted


class Reporter:
    """Counts and logs the engine's steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: PrefixCache,
        healer: Healer,
        events: EventSink | None = None,
        store: Offloader | None = None,
    ) -> None:
        self.counters = Counters()
        self._healer = healer
        self._scheduler = scheduler
        self._cache = cache
        self._events = events
        self._store = store
        self._decode_steps = 0
        self._last_line = (time.monotonic(), 0)

    def snapshot(self) -> EngineSnapshot:
        """Only on the engine's thread."""
        pool, size = self._cache.pool, self._cache.page_size
        # Not `stats()`, which calls providers: servers take a snapshot after every step.
        inspector, evictable = self._cache.inspector, self._cache.evictable_pages
        cached, reuse = inspector.counters, inspector.reuse_counts()
        return EngineSnapshot(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            total_tokens=pool.num_pages * size,
            free_tokens=pool.num_free * size,
            used_tokens=(pool.num_pages - pool.num_free - evictable) * size,
            cached_tokens=inspector.cached_pages * size,
            evictable_tokens=evictable * size,
            **vars(self.counters),
            **vars(self._healer.counters),
            prompt_tokens=cached.query_tokens,
            hit_tokens=dict(cached.hit_tokens),
            evicted_tokens=cached.evicted_pages * size,
            dropped_event_batches=0 if self._events is None else self._events.dropped,
            paraphrase_refused=reuse.declined,
            provider_events=reuse.events,
            provider_figures=reuse.provider,
            heals_waiting=len(self._healer),
            store_figures={} if self._store is None else self._store.figures(),
        )

    def planned(self, step: Step) -> None:
        """Called between planning and running a step."""
        counters = self.counters
        counters.preemptions += step.preempted
        if not step.rows:
            return
        counters.steps += 1
        prefills = [row for row in step.rows if row.prefill]
        if prefills:
            new_tokens = sum(row.sequence.computed(row.count) for row in prefills)
            counters.prefill_steps += 1
            counters.prefill_tokens += new_tokens
            self._log_prefill(step.admitted, new_tokens)
        else:
            self._decode_steps += 1
            if self._decode_steps % _DECODE_LINE_STEPS == 0:
                self._log_decode()
        if step.preempted:
            logger.info(
                "Preempted for room or priority, #preempted-req: %d, #queue-req: %d",
                step.preempted,
                len(self._scheduler.waiting),
            )

    def ended(self, reason: FinishReason | None) -> None:
        """An answer is over."""
        if reason == "abort":
            self.counters.aborted += 1
        elif reason == "error":
            self.counters.failed += 1
        else:
            self.counters.finished += 1

    def _log_prefill(self, admitted: Iterable[Sequence], new_tokens: int) -> None:
        plans = [sequence.plan for sequence in admitted]
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, #fuzzy-token: %d, "
            "token usage: %.2f, #running-req: %d, #queue-req: %d",
            len(plans),
            new_tokens,
            sum(plan.exact for plan in plans),
            sum(plan.served for plan in plans),
            self._usage(),
            len(self._scheduler.running),
            len(self._scheduler.waiting),
        )

    def _log_decode(self) -> None:
        now, generated = time.monotonic(), self.counters.generated_tokens
        then, before = self._last_line
        self._last_line = (now, generated)
        logger.info(
            "Decode batch, #running-req: %d, token usage: %.2f, "
            "gen throughput (token/s): %.1f, #queue-req: %d",
            len(self._scheduler.running),
            self._usage(),
            (generated - before) / max(now - then, 1e-9),
            len(self._scheduler.waiting),
        )

    def _usage(self) -> float:
        """Share of the pool that is neither free nor evictable."""
        pool = self._cache.pool
        return 1 - (pool.num_free + self._cache.evictable_pages) / pool.num_pages
