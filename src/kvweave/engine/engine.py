"""The engine: takes requests, plans and runs one step at a time, and returns deltas of answers.

Not thread-safe: one thread adds, aborts and steps. AsyncEngine serves many threads with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvweave.config import EngineConfig
from kvweave.engine.execution.executor import (
    BatchBuilder,
    BatchExecutor,
    EngineComponents,
    RowOutput,
)
from kvweave.engine.heal import Healer
from kvweave.engine.output import SequenceOutput, SequenceOutputFactory
from kvweave.engine.sampling.grammar import GrammarCompiler
from kvweave.engine.scheduler.drafts import Drafter
from kvweave.engine.scheduler.request import RequestGroup, Sequence, Status
from kvweave.engine.scheduler.scheduler import Row, Scheduler
from kvweave.engine.stats import Reporter
from kvweave.engine.types import EngineSnapshot, GenerateRequest, Limits, OutputDelta
from kvweave.errors import (
    EngineDeadError,
    IntegrityError,
    KvweaveError,
    OverloadedError,
    RequestError,
)
from kvweave.prefix.lease import Namespace
from kvweave.reorder import CachedPrefixes

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from kvweave.models.load import LoadedModel

logger = logging.getLogger("kvweave.engine")

MAX_FAILURES = 5
"""Steps in a row without a result before the engine tests itself."""
_STORE_SECONDS, _IDLE_STORE_SECONDS = 0.001, 0.005
"""For copies from and to the store between two steps, while requests run and while none does."""
_IDLE_SECONDS = 0.002
"""Between two looks at the waiting requests, while all of them wait for the store."""


class Engine:
    """Serves a loaded model: `step()` until `has_work` is False. It has no thread of its own."""

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, components: EngineComponents | None = None
    ) -> None:
        """Builds the components unless given. ConfigError where model and flags do not fit."""
        config.validate()
        self.config = config
        self.loaded = loaded
        if components is None:
            # Imported here: it loads the models' code for seconds, and is not always needed.
            from kvweave.engine.factory import build_components

            components = build_components(config, loaded)
        self.components = components
        pool, self.cache = self.components.pool, self.components.cache
        slots = pool.num_pages * pool.page_size
        self.limits = Limits(loaded.context_length, slots, loaded.vocab_size)
        drafts = config.speculative
        drafter = Drafter(self.cache, drafts) if drafts.algorithm != "none" else None
        self.scheduler = Scheduler(self.cache, config.scheduler, drafter)
        self._store = store = self.components.store
        if store is not None:
            self.scheduler.store = store
            store.release_by(self.scheduler.give_back)
        self.dead = False
        """Failed too often in a row: no request is answered any more."""
        self.grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
        """Compiles on any thread; the rest of the engine belongs to one."""
        self._maker = SequenceOutputFactory(loaded.tokenizer, loaded.eos_token_ids, self.grammars)
        self._seeds = np.random.default_rng(config.scheduler.random_seed)
        batch_builder = BatchBuilder(pool.page_size)
        self._executor = BatchExecutor(components, batch_builder)
        most_to_heal = config.fuzzy.heal_queue if config.fuzzy.heal else 0
        self._healer = Healer(components, batch_builder, most_to_heal, self.scheduler.give_back)
        self._reporter = Reporter(
            self.scheduler, self.cache, self._healer, components.events, components.store
        )
        self._groups: dict[str, RequestGroup] = {}
        self._answers: dict[Sequence, SequenceOutput] = {}
        self._deltas: list[OutputDelta] = []
        self._arrivals = 0
        self._failures = 0
        self._failed_best_efforts: set[str] = set()

    @property
    def has_work(self) -> bool:
        """Whether any request lives."""
        return bool(self._groups)

    def add(self, request: GenerateRequest, grammar: LLMatcher | None = None) -> None:
        """Queue a request; RequestError if it cannot be served, OverloadedError if many wait.

        `grammar` is the request's, from `grammars.compile`; it is compiled here if left out.
        """
        if self.dead:
            raise EngineDeadError("the engine failed too often in a row and has stopped")
        self.limits.check(request)
        if request.rid in self._groups:
            raise RequestError(f"a request with rid {request.rid!r} is running", param="rid")
        self.check_queue()
        if grammar is None and request.sampling.grammar is not None:
            grammar = self.grammars.compile(request.sampling.grammar)
        group = RequestGroup(request, self.namespace(request.cache_salt))
        prompt, limit = np.array(request.prompt_ids, np.int32), self.limits.longest(request)
        drawn = int(self._seeds.integers(2**63))
        answers: dict[Sequence, SequenceOutput] = {}
        for index in range(request.sampling.n):
            sequence = Sequence(group, index, self._arrivals, prompt, limit)
            self._arrivals += 1
            answers[sequence] = self._maker.make(sequence, drawn, grammar)
        # Nothing is known of the request until all of it could be made.
        self._groups[request.rid] = group
        self._answers.update(answers)
        for sequence in answers:
            group.sequences.append(sequence)
            self.scheduler.add(sequence)
        if self._store is not None:
            self._best_effort(self._store.expect, next(iter(answers)).view())
        self._healer.give_way()
        self._reporter.counters.requests += 1

    def namespace(self, salt: str | None) -> Namespace:
        """The namespace in which requests with this `cache_salt` share KV."""
        return Namespace(model=self.loaded.identity, salt=salt)

    def check_queue(self, more: int = 0) -> None:
        """OverloadedError if no further request may wait behind those here and `more`."""
        waiting = len(self.scheduler.waiting) + more
        most = self.config.scheduler.max_queued_requests
        if waiting >= most:
            raise OverloadedError(f"{waiting} answers wait already, {most} may; try again later")

    def abort(self, rid: str) -> list[OutputDelta]:
        """End a request now, wherever it is; the last deltas of its answers, none if unknown."""
        group = self._groups.get(rid)
        for sequence in list(group.sequences) if group else ():
            self._close(sequence, self._answers[sequence].end("abort"))
        return self._take_deltas()

    @torch.inference_mode()
    def step(self) -> list[OutputDelta]:
        """Plan and run one forward pass; returns the new deltas in the order of the batch.

        Never raises because of a request: an error ends that request in its own last delta.
        """
        if not self.dead:
            if self._store is not None:
                budget = _STORE_SECONDS if self.scheduler.running else _IDLE_STORE_SECONDS
                self._best_effort(self._store.pump, budget)
            self._step()
            self._best_effort(self._tell)
        return self._take_deltas()

    def prefixes(self, cache_salt: str | None = None) -> CachedPrefixes:
        """Exact prefixes that are cached now, for clients that can choose the order of a prompt."""
        return CachedPrefixes(self.cache, self.namespace(cache_salt))

    @torch.inference_mode()
    def heal(self, wanted: Callable[[], bool] = lambda: False) -> bool:
        """When idle, compute a chunk of a prompt that was served approximately (--fuzzy-heal).

        Does so only while no request lives, and gives up between two layers once `wanted()`: then
        that chunk is computed again later. False if there was nothing to do. Pages whose release
        failed earlier are released now.
        """
        if self.dead or self._groups:
            return False
        self.scheduler.settle()
        if self._store is not None and self._store.pump(_IDLE_STORE_SECONDS):
            self._best_effort(self._tell)
            return True
        self._best_effort(self._begin_step, self.config.scheduler.chunked_prefill_size)
        if not self._healer.step(wanted):
            return False
        self._best_effort(self._tell)
        return True

    def flush_cache(self) -> None:
        """Forget all cached KV. RequestError (409) while any request lives."""
        if self._groups:
            raise RequestError(
                f"the cache cannot be flushed while requests run or wait ({len(self._groups)} now)",
                status=409,
            )
        self._healer.clear()
        self.scheduler.settle()
        self.cache.reset()
        self._best_effort(self._tell)

    def close_session(self, session: str, cache_salt: str | None = None) -> int:
        """Forget what a session computed behind moved text; returns how many tokens."""
        return self.cache.close_session(self.namespace(cache_salt), session)

    def on_background_progress(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, on any thread, when an idle engine should call `heal` again."""
        if self._store is not None:
            self._store.wake_by(wake)

    def snapshot(self) -> EngineSnapshot:
        """Gauges and counters, as of now."""
        return self._reporter.snapshot()

    def check(self) -> None:
        """Prove that pages, owners, queues and answers add up; IntegrityError if not."""
        self.scheduler.check()
        alive = set(self.scheduler.sequences())
        grouped = [s for group in self._groups.values() for s in group.sequences]
        if not alive == set(self._answers) == set(grouped) or len(alive) != len(grouped):
            raise IntegrityError(
                f"{len(alive)} sequences are queued, {len(self._answers)} have an answer, "
                f"{len(grouped)} belong to a request"
            )

    def close(self) -> None:
        """Write what the store is still to keep, send pending events and close their sink."""
        if self._store is not None:
            self._store.close()
        if self.components.events is not None:
            self.components.events.close()

    def _tell(self) -> None:
        """Publish the changes of the cache as events."""
        if self.components.events is not None and (events := self.cache.take_events()):
            self.components.events.publish(events)

    def _take_deltas(self) -> list[OutputDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _best_effort(self, call: Callable[..., object], *given: object) -> None:
        """Make a call that no answer depends on (counters, events, healing); log its faults."""
        try:
            call(*given)
        except Exception:
            name = getattr(call, "__qualname__", repr(call))
            if name not in self._failed_best_efforts:
                self._failed_best_efforts.add(name)
                logger.error("%s failed, answers go on; logged once", name, exc_info=True)

    def _step(self) -> None:
        try:
            step = self.scheduler.schedule()
        except Exception as error:
            self._fail_plan(error)
            return
        for sequence, failure in step.failed:
            self._fail(sequence, failure)
        self._best_effort(self._reporter.planned, step)
        if not step.rows:
            if self._store is not None:
                self._store.wait(_IDLE_SECONDS)
            return
        states = {s: self._answers[s].sampling for s in (row.sequence for row in step.rows)}
        last: Exception | None = None
        computed = False
        self._best_effort(self._begin_step, sum(row.count for row in step.rows))
        began = time.perf_counter()
        for row, output in self._executor.run(step.rows, states):
            computed |= output.computed
            try:
                self._advance(row, output)
            except Exception as error:
                last = error
                self._fail(row.sequence, error, logged=output.logged)
        took = time.perf_counter() - began
        self.scheduler.took(took)
        if self.components.threads is not None:
            self.components.threads.took(took)
        if self._store is not None:
            tokens = sum(row.count for row in step.rows if row.prefill)
            self._store.stepped(tokens, took)
        if computed:
            self._failures = 0
        elif last is not None:
            self._got_nothing_done(last, self._executor.work)

    def _begin_step(self, tokens: int) -> None:
        if self.components.threads is not None:
            self.components.threads.begin(tokens)

    def _advance(self, row: Row, output: RowOutput) -> None:
        """Count the progress of a row and add its tokens to its answer."""
        if output.error is not None:
            raise output.error
        sequence = row.sequence
        if output.chosen is not None:
            sequence.recomputed.append(output.chosen)
        self.scheduler.commit(row)
        answer = self._answers[sequence]
        if output.scores:
            answer.score(output.scores)
        if output.tokens:
            delta = answer.accept(output.tokens, output.logprobs)
            accepted = len(delta.token_ids) - 1
            self.scheduler.commit_draft(row, accepted)
            self._reporter.counters.sampled(len(row.draft), accepted)
        elif row.completes:
            delta = answer.end("length")  # nothing was to be generated
        else:
            return
        if delta.finish_reason is None:
            self._deltas.append(delta)
        else:
            self._close(sequence, delta)

    def _fail_plan(self, error: Exception) -> None:
        """No step could be planned: fail what runs and what the plan had ended."""
        logger.error("no step could be planned", exc_info=error)
        for sequence in [s for s in self._answers if s.status is not Status.WAITING]:
            self._fail(sequence, error, logged=True)
        self._got_nothing_done(error, lambda: False)

    def _got_nothing_done(self, error: Exception, works: Callable[[], bool]) -> None:
        """Count a step without result; several in a row stop the engine unless it `works`."""
        self._failures += 1
        if self._failures < MAX_FAILURES:
            return
        if works():
            self._failures = 0
            return
        self.dead = True
        logger.critical("the engine gives up after %d failures in a row", self._failures)
        for sequence in list(self.scheduler.sequences()):
            self._fail(sequence, error, logged=True)

    def _fail(self, sequence: Sequence, error: Exception, logged: bool = False) -> None:
        rid = sequence.group.request.rid
        cause = None if logged else error  # one traceback, though many may fail of one error
        logger.error("request %s failed", rid, exc_info=cause, extra={"rid": rid})
        reason = str(error) if isinstance(error, KvweaveError) else f"internal error: {error!r}"
        self._close(sequence, self._answers[sequence].end("error", reason))

    def _close(self, sequence: Sequence, last: OutputDelta) -> None:
        """End an answer: release its pages and send its last delta."""
        if last.finish_reason in ("stop", "length"):
            self._best_effort(self._healer.served, sequence)
            self._best_effort(self.scheduler.retain, sequence)
        if self._store is not None and sequence.lease is not None:
            self._best_effort(self._store.offer, sequence.lease, sequence.tokens)
        self.scheduler.end(sequence)
        self._best_effort(self._reporter.ended, last.finish_reason)
        del self._answers[sequence]
        group = sequence.group
        group.sequences.remove(sequence)
        if not group.sequences:
            del self._groups[group.request.rid]
            if self._store is not None:
                self._store.forget(group.request.rid)
        self._deltas.append(last)
