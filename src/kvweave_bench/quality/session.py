"""One arm at work: an engine of its own over the shared model, serving one prompt at a time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from kvweave.config import CacheConfig, EngineConfig, ModelConfig
from kvweave.engine.components import Runner
from kvweave.engine.engine import Engine
from kvweave.engine.execution.runner import ModelRunner
from kvweave.engine.factory import build_components
from kvweave.engine.logit_recorder import LogitRecorder, RecordedLogits
from kvweave.engine.types import GenerateRequest, SamplingParams
from kvweave.errors import KvweaveError
from kvweave.fuzzy.backend import FuzzyCache
from kvweave.kv.pool import IntArray
from kvweave.kv.relocation import TensorMover
from kvweave.models import LoadedModel
from kvweave_bench.driver import Answer
from kvweave_bench.measure import quiet_collector
from kvweave_bench.quality.arms import Arm
from kvweave_bench.quality.tape import Player, Recorder, Tape


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """An answer, as its client and as its model saw it."""

    answer: Answer
    trace: RecordedLogits
    text: str


_PATIENCE = 60.0
"""Seconds."""


class Session:
    """An engine with a probe in front of its runner."""

    def __init__(
        self,
        loaded: LoadedModel,
        model: ModelConfig,
        arm: Arm | None,
        slots: int,
        provider: str = "spans",
    ) -> None:
        """Without an arm: the reference, which reuses nothing. `slots`: the pool's, in tokens."""
        backend = "none" if arm is None else arm.backend
        config = EngineConfig(
            model=model,
            cache=CacheConfig(prefix_cache_backend=backend, max_total_tokens=slots),
        )
        if arm is not None:
            # Whoever compares meanings gets the time for it: this is about answers.
            fuzzy = replace(arm.fuzzy, provider=provider, semantic_budget_ms=_PATIENCE * 1e3)
            config = replace(config, fuzzy=fuzzy, scheduler=arm.scheduler)
        components = build_components(config, loaded, arm.mover if arm else TensorMover)
        assert isinstance(components.runner, ModelRunner)
        self.runner = components.runner
        self.probe = LogitRecorder(self.runner)
        self.engine = Engine(config, loaded, replace(components, runner=self.probe))
        self._decode = loaded.tokenizer.decode
        self._ids = itertools.count()

    def serve(
        self,
        prompt: IntArray,
        max_tokens: int,
        dictated: Sequence[int] = (),
        protected_from: int | None = None,
    ) -> Served:
        """Answer greedily, or as dictated. Raises KvweaveError if the engine gives up."""
        self.probe.begin(dictated)
        with nullcontext() if dictated else quiet_collector():  # what is dictated is not timed
            answer = self._run(prompt, max_tokens, protected_from=protected_from)
        trace = self.probe.trace()
        return Served(answer, trace, self._decode(trace.tokens, skip_special_tokens=True))

    def record(self, prompt: IntArray) -> Tape:
        """Compute a prompt, and copy the KV that this took. For sessions that reuse nothing."""
        recorder = Recorder(self.runner)
        with self._instead(recorder):
            self._run(prompt, 1)
        return recorder.tape()

    def lend(self, prompt: IntArray, tape: Tape) -> Answer:
        """Serve a prompt from its tape: from now on it is a donor."""
        with self._instead(Player(tape, self.runner.kv)):
            return self._run(prompt, 1, fuzzy=False)

    def forget(self) -> None:
        """As if nothing had ever been served."""
        self.engine.flush_cache()

    @contextmanager
    def _instead(self, runner: Runner) -> Iterator[None]:
        self.probe.begin()
        self.probe.runner = runner
        try:
            yield
        finally:
            self.probe.runner = self.runner

    def settle(self) -> None:
        """Wait until what was served is known as a donor in every way."""
        cache = self.engine.cache
        if isinstance(cache, FuzzyCache) and not cache.settle(_PATIENCE):
            raise KvweaveError("the provider of reuse does not come to rest")

    def _run(
        self,
        prompt: IntArray,
        max_tokens: int,
        fuzzy: bool = True,
        protected_from: int | None = None,
    ) -> Answer:
        answer = Answer(prompt)
        request = GenerateRequest(
            rid=f"quality-{next(self._ids)}",
            prompt_ids=tuple(prompt.tolist()),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            fuzzy=fuzzy,
            protected_from=protected_from,
        )
        start = time.perf_counter()
        self.engine.add(request)
        while self.engine.has_work:
            for delta in self.engine.step():
                if delta.error is not None:
                    raise KvweaveError(f"the engine gave up on a prompt: {delta.error}")
                answer.token_ids += delta.token_ids
                now = time.perf_counter() - start
                answer.token_seconds += [now] * len(delta.token_ids)
                answer.usage = delta.usage
                answer.plan = delta.plan or answer.plan
        return answer
