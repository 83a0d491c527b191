"""Engines of bench quality: one per variant over the shared model, and recorded KV for donors."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from kvweave.config import CacheConfig, EngineConfig, ModelConfig
from kvweave.engine.attention.base import ForwardBatch
from kvweave.engine.engine import Engine
from kvweave.engine.execution.executor import Runner
from kvweave.engine.execution.runner import ModelRunner
from kvweave.engine.factory import build_components
from kvweave.engine.selfcheck.measure import LogitRecorder, RecordedLogits
from kvweave.engine.types import GenerateRequest, SamplingParams
from kvweave.errors import KvweaveError
from kvweave.fuzzy.backend import FuzzyCache
from kvweave.kv.pool import IntArray
from kvweave.kv.relocation import TensorMover
from kvweave.kv.tensors import KVTensors
from kvweave.models import LoadedModel
from kvweave_bench.driver import Answer
from kvweave_bench.measure import quiet_collector
from kvweave_bench.quality.variants import Variant


@dataclass(frozen=True, slots=True, eq=False)
class RecordedKV:
    """One prompt's KV, computed by one engine and lent to several.

    keys, values: by layer, (N, heads, dim) in the order of positions. logits: float32 (1, V), those
    after the prompt.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    logits: torch.Tensor


class KVRecorder:
    """A runner that computes one prompt from its first token on and copies its KV."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._chunks: list[RecordedKV] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        logits = self.runner.forward(batch)
        kv = self.runner.kv
        slots = torch.from_numpy(batch.slots).to(kv.device)
        # Indexing copies: the pool's slots are soon used again.
        layers = range(len(kv.layouts))
        keys, values = (
            tuple(read(layer, slots) for layer in layers) for read in (kv.read_keys, kv.read_values)
        )
        self._chunks.append(RecordedKV(keys, values, logits.clone()))
        return logits

    def recorded(self) -> RecordedKV:
        """Everything that was computed so far."""
        layers = range(len(self.runner.kv.layouts))
        return RecordedKV(
            tuple(torch.cat([chunk.keys[layer] for chunk in self._chunks]) for layer in layers),
            tuple(torch.cat([chunk.values[layer] for chunk in self._chunks]) for layer in layers),
            self._chunks[-1].logits,
        )


class KVPlayer:
    """A runner that copies recorded KV into a batch's slots and returns the recorded logits."""

    def __init__(self, recorded: RecordedKV, kv: KVTensors) -> None:
        self.recorded = recorded
        self.kv = kv

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        at = torch.from_numpy(batch.positions).to(self.kv.device)
        slots = torch.from_numpy(batch.slots).to(self.kv.device)
        for layer, (keys, values) in enumerate(
            zip(self.recorded.keys, self.recorded.values, strict=True)
        ):
            self.kv.write(layer, slots, keys[at], values[at])
        return self.recorded.logits[: len(batch.logits_at)].clone()


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """An answer: the client's view of it, the recorded logits, and the text."""

    answer: Answer
    trace: RecordedLogits
    text: str


_PATIENCE = 60.0
"""Seconds."""


class Session:
    """An engine with a logit recorder in front of its runner."""

    def __init__(
        self,
        loaded: LoadedModel,
        model: ModelConfig,
        variant: Variant | None,
        slots: int,
        provider: str = "spans",
        backend: str = "none",
    ) -> None:
        """`variant` None: a reference, without reuse or with that of an exact `backend`.

        `slots`: the pool's size in tokens.
        """
        backend = backend if variant is None else variant.backend
        if variant is not None:
            loaded = variant.of(loaded)
        config = EngineConfig(
            model=model,
            cache=CacheConfig(prefix_cache_backend=backend, max_total_tokens=slots),
        )
        if variant is not None:
            # Time for the semantic provider: this bench compares answers.
            fuzzy = replace(variant.fuzzy, provider=provider, semantic_budget_ms=_PATIENCE * 1e3)
            config = replace(config, fuzzy=fuzzy, scheduler=variant.scheduler)
        components = build_components(config, loaded, variant.mover if variant else TensorMover)
        assert isinstance(components.runner, ModelRunner)
        self.runner = components.runner
        self.recorder = LogitRecorder(self.runner)
        self.engine = Engine(config, loaded, replace(components, runner=self.recorder))
        self._decode = loaded.tokenizer.decode
        self._ids = itertools.count()

    def serve(
        self,
        prompt: IntArray,
        max_tokens: int,
        forced: Sequence[int] = (),
        protected_from: int | None = None,
        session: str | None = None,
    ) -> Served:
        """Answer greedily, or with the tokens `forced` (teacher forcing). Raises KvweaveError."""
        self.recorder.begin(forced)
        with nullcontext() if forced else quiet_collector():  # teacher forcing is not timed
            answer = self._run(prompt, max_tokens, protected_from=protected_from, session=session)
        trace = self.recorder.trace()
        return Served(answer, trace, self._decode(trace.tokens, skip_special_tokens=True))

    def record(self, prompt: IntArray) -> RecordedKV:
        """Compute a prompt and copy its KV. For sessions without reuse."""
        recorder = KVRecorder(self.runner)
        with self._instead(recorder):
            self._run(prompt, 1)
        return recorder.recorded()

    def lend(self, prompt: IntArray, recorded: RecordedKV) -> Answer:
        """Serve a prompt from its recording: from now on it is a donor."""
        with self._instead(KVPlayer(recorded, self.runner.kv)):
            return self._run(prompt, 1, fuzzy=False)

    def forget(self) -> None:
        """Empty the cache."""
        self.engine.flush_cache()

    @contextmanager
    def _instead(self, runner: Runner) -> Iterator[None]:
        self.recorder.begin()
        self.recorder.runner = runner
        try:
            yield
        finally:
            self.recorder.runner = self.runner

    def settle(self) -> None:
        """Wait until the provider knows everything that was served."""
        cache = self.engine.cache
        if isinstance(cache, FuzzyCache) and not cache.settle(_PATIENCE):
            raise KvweaveError("the provider of reuse does not come to rest")

    def _run(
        self,
        prompt: IntArray,
        max_tokens: int,
        fuzzy: bool = True,
        protected_from: int | None = None,
        session: str | None = None,
    ) -> Answer:
        answer = Answer(prompt)
        request = GenerateRequest(
            rid=f"quality-{next(self._ids)}",
            prompt_ids=tuple(prompt.tolist()),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            fuzzy=fuzzy,
            protected_from=protected_from,
            session=session,
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
