"""The engine: requests in, one step at a time, pieces of answers out.

Not thread-safe: one thread adds, aborts and steps. AsyncEngine serves many with one of these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvweave.config import EngineConfig
from kvweave.engine.answer import Answer, AnswerMaker
from kvweave.engine.heal import Healer
from kvweave.engine.limits import Limits
from kvweave.engine.machinery import Machinery
from kvweave.engine.packing import Packer, RowLogits
from kvweave.engine.readout import Outcome, read_out
from kvweave.engine.reporting import Reporter
from kvweave.engine.request import RequestGroup, Sequence
from kvweave.engine.scheduler import Scheduler, Step
from kvweave.engine.types import EngineSnapshot, GenerateRequest, OutputDelta
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
    from kvweave.models.loading import LoadedModel

logger = logging.getLogger("kvweave.engine")

MAX_FAILURES = 5
"""Forward passes that may fail in a row before the engine gives up."""


class Engine:
    """Serves a loaded model: `step()` until `has_work` is False; nothing happens in between."""

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, machinery: Machinery | None = None
    ) -> None:
        """Builds the machinery unless given. ConfigError where model and flags do not fit."""
        config.validate()
        self.config = config
        self.loaded = loaded
        if machinery is None:
            # Here: it loads the models' code, which takes seconds and is not always needed.
            from kvweave.engine.building import build_machinery

            machinery = build_machinery(config, loaded)
        self.machinery = machinery
        pool, self.cache = self.machinery.pool, self.machinery.cache
        slots = pool.num_pages * pool.page_size
        self.limits = Limits(loaded.context_length, slots, loaded.vocab_size)
        self.scheduler = Scheduler(self.cache, config.scheduler)
        self.dead = False
        """Failed too often in a row: nothing will be answered any more."""
        self._maker = AnswerMaker(loaded.tokenizer, loaded.eos_token_ids)
        self._seeds = np.random.default_rng(config.scheduler.random_seed)
        self._packer = Packer(pool.page_size)
        most_to_heal = config.fuzzy.fuzzy_heal_queue if config.fuzzy.fuzzy_heal else 0
        self._healer = Healer(self.machinery, self._packer, most_to_heal)
        self._reporter = Reporter(self.scheduler, self.cache, self._healer, machinery.events)
        self._groups: dict[str, RequestGroup] = {}
        self._answers: dict[Sequence, Answer] = {}
        self._deltas: list[OutputDelta] = []
        self._arrivals = 0
        self._failures = 0

    @property
    def has_work(self) -> bool:
        """Whether any request lives."""
        return bool(self._groups)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; RequestError if it cannot be served, OverloadedError if many wait."""
        if self.dead:
            raise EngineDeadError("the engine failed too often in a row and has stopped")
        self.limits.check(request)
        if request.rid in self._groups:
            raise RequestError(f"a request with rid {request.rid!r} is running", param="rid")
        self.check_queue()
        namespace = self.namespace(request.cache_salt)
        group = self._groups[request.rid] = RequestGroup(request, namespace)
        prompt = np.array(request.prompt_ids, np.int32)
        drawn = int(self._seeds.integers(2**63))
        for index in range(request.sampling.n):
            limit = self.limits.longest(request)
            sequence = Sequence(group, index, self._arrivals, prompt, limit)
            self._arrivals += 1
            self._answers[sequence] = self._maker.make(sequence, drawn)
            group.sequences.append(sequence)
            self.scheduler.add(sequence)
        self._healer.give_way()
        self._reporter.counters.requests += 1

    def namespace(self, salt: str | None) -> Namespace:
        """What requests with this `cache_salt` share KV within."""
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
        """Plan and run one forward pass; returns what became known, in the order of the batch.

        Never raises for a request's sake: what fails, fails in that request's own last delta.
        """
        if not self.dead:
            self._step()
            self._tell()
        return self._take_deltas()

    def prefixes(self, cache_salt: str | None = None) -> CachedPrefixes:
        """What of a prompt is cached as its exact prefix now, for whoever may choose its order."""
        return CachedPrefixes(self.cache, self.namespace(cache_salt))

    @torch.inference_mode()
    def heal(self, wanted: Callable[[], bool] = lambda: False) -> bool:
        """Compute a chunk of what was served approximately, with --fuzzy-heal.

        Does so only while no request lives, and gives up between two layers once `wanted()`: then
        that chunk is computed again later. False if there was nothing to do.
        """
        if self.dead or self._groups or not self._healer.step(wanted):
            return False
        self._tell()
        return True

    def flush_cache(self) -> None:
        """Forget all cached KV. RequestError (409) while any request lives."""
        if self._groups:
            raise RequestError(
                f"the cache cannot be flushed while requests run or wait ({len(self._groups)} now)",
                status=409,
            )
        self._healer.clear()
        self.cache.reset()
        self._tell()

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
        """Nothing will follow: send what others wait for, give back what is not memory."""
        if self.machinery.events is not None:
            self.machinery.events.close()

    def _tell(self) -> None:
        """Whoever follows the cache learns what changed in it."""
        if self.machinery.events is not None and (events := self.cache.take_events()):
            self.machinery.events.publish(events)

    def _take_deltas(self) -> list[OutputDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _step(self) -> None:
        step: Step | None = None
        try:
            step = self.scheduler.schedule()
            self._reporter.planned(step)
            for sequence, error in step.failed:
                self._fail(sequence, error)
            if not step.rows:
                return
            batch, wanted = self._packer.pack(step.rows)
            logits = self.machinery.runner.forward(batch)
            states = {s: self._answers[s].sampling for s in (row.sequence for row in step.rows)}
            outcomes = read_out(logits, wanted, states)
        except Exception as error:
            self._fail_step(step, error)
            return
        self._failures = 0
        for row, (part, outcome) in enumerate(zip(wanted, outcomes, strict=True)):
            try:
                if batch.screening is not None:
                    part.row.sequence.refreshed.append(batch.chosen(row))
                self._advance(part, outcome)
            except Exception as error:
                self._fail(part.row.sequence, error)

    def _advance(self, part: RowLogits, outcome: Outcome) -> None:
        """One row's forward pass succeeded: its progress counts, and its answer goes on."""
        if outcome.error is not None:
            raise outcome.error
        self.scheduler.commit(part.row)
        sequence = part.row.sequence
        answer = self._answers[sequence]
        if outcome.scores:
            answer.score(outcome.scores)
        if outcome.token is not None:
            delta = answer.accept(outcome.token, outcome.logprob)
            self._reporter.counters.generated_tokens += 1
        elif part.row.completes:
            delta = answer.end("length")  # nothing was to be generated
        else:
            return
        if delta.finish_reason is None:
            self._deltas.append(delta)
        else:
            self._close(sequence, delta)

    def _fail_step(self, step: Step | None, error: Exception) -> None:
        """Fail exactly those whom the error concerns: the batch, or all that ran without one."""
        self._failures += 1
        logger.error("a step failed (%d in a row)", self._failures, exc_info=error)
        self.dead = self._failures >= MAX_FAILURES
        if self.dead:
            concerned = list(self.scheduler.sequences())
            logger.critical("the engine gives up after %d failures in a row", self._failures)
        elif step is None:
            concerned = list(self.scheduler.running)
        else:
            concerned = [row.sequence for row in step.rows]
        for sequence in concerned:
            self._fail(sequence, error, logged=True)

    def _fail(self, sequence: Sequence, error: Exception, logged: bool = False) -> None:
        rid = sequence.group.request.rid
        told = None if logged else error  # one traceback, though many may fail of one error
        logger.error("request %s failed", rid, exc_info=told, extra={"rid": rid})
        reason = str(error) if isinstance(error, KvweaveError) else f"internal error: {error!r}"
        self._close(sequence, self._answers[sequence].end("error", reason))

    def _close(self, sequence: Sequence, last: OutputDelta) -> None:
        """The answer is over: its pages go back, its last delta goes out."""
        if last.finish_reason in ("stop", "length"):
            self._healer.served(sequence)
        self.scheduler.end(sequence)
        self._reporter.ended(last.finish_reason)
        del self._answers[sequence]
        group = sequence.group
        group.sequences.remove(sequence)
        if not group.sequences:
            del self._groups[group.request.rid]
        self._deltas.append(last)
