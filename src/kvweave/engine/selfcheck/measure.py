"""Measures how moved KV, and quantised weights, change a model's next tokens.

The self-check's prompts are served cold and with moved KV, and the two are compared. A recorder
around the engine's runner keeps the logits of an answer and can force its tokens (teacher forcing):
a greedy sampler takes the largest logit, so a token is forced by raising its logit after the
model's own logits have been recorded.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch.nn import functional

from kvweave.config import EngineConfig, ModelConfig, SchedulerConfig
from kvweave.engine.attention import get_backend
from kvweave.engine.attention.base import ForwardBatch
from kvweave.engine.engine import Engine
from kvweave.engine.execution.executor import Runner
from kvweave.engine.execution.runner import ModelRunner
from kvweave.engine.factory import build_components
from kvweave.engine.selfcheck.cases import SelfCheckCase, build_cases
from kvweave.engine.types import GenerateRequest, SamplingParams
from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray
from kvweave.kv.tensors import KVTensors
from kvweave.models.cache import Progress, silent
from kvweave.models.load import LoadedModel, load_model


@dataclass(frozen=True, slots=True, eq=False)
class RecordedLogits:
    """The logits and tokens of one answer.

    logits: float32 (T, V) on the CPU, as the model returned them; row t precedes token t.
    tokens: (T), including the one that ended the answer.
    """

    logits: torch.Tensor
    tokens: tuple[int, ...]


class LogitRecorder:
    """Wraps an engine's runner; records one greedy request at a time."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._rows: list[torch.Tensor] = []
        self._tokens: list[int] = []
        self._forced: tuple[int, ...] = ()

    def begin(self, teacher_forced: Sequence[int] = ()) -> None:
        """Start a new recording; the answer's first tokens will be `teacher_forced`."""
        self._rows, self._tokens, self._forced = [], [], tuple(teacher_forced)

    def trace(self) -> RecordedLogits:
        """The recording since `begin`."""
        return RecordedLogits(torch.stack(self._rows), tuple(self._tokens))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        logits = self.runner.forward(batch)
        if not len(batch.logits_at):  # a chunk of a prompt that goes on
            return logits
        if len(logits) != 1:
            raise KvweaveError(f"a logit recorder takes one request, but {len(logits)} ran")
        step = len(self._rows)
        self._rows.append(logits[0].to("cpu", copy=True))
        if step < len(self._forced):
            logits[0, self._forced[step]] = logits[0].max() + 1
        self._tokens.append(int(logits[0].max(dim=-1).indices))
        return logits


Verdict = Literal["gold", "decoy", "neither"]


def kl_divergence(cold: torch.Tensor, warm: torch.Tensor) -> torch.Tensor:
    """KL(cold || warm) in nats, row by row: two float (T, V) of logits in, float64 (T) out.

    In float64, since float32 rounding alone would look like 1e-6 nats over a large vocabulary.
    """
    p, q = (logits.double().log_softmax(-1) for logits in (cold, warm))
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)


def words(text: str) -> list[str]:
    """Lower-case runs of letters and digits, thousands separators dropped: 1,024 is one word."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.lower())
    return re.findall(r"[^\W_]+", text)


def verdict(answer: str, gold: str, decoy: str | None = None) -> Verdict:
    """Which of two facts an answer gives: the phrase that occurs first in it, as whole words.

    Only the first counts, since a small model often goes on talking after its answer.
    """
    said = words(answer)
    at_gold = _index(said, words(gold))
    at_decoy = None if decoy is None else _index(said, words(decoy))
    if at_gold is None:
        return "neither" if at_decoy is None else "decoy"
    if at_decoy is None:
        return "gold"
    # "450 litres" and "450 litres an hour" begin together: the longer phrase is the answer.
    if at_decoy == at_gold:
        return "gold" if len(words(gold)) >= len(words(decoy or "")) else "decoy"
    return "gold" if at_gold < at_decoy else "decoy"


def _index(said: list[str], phrase: list[str]) -> int | None:
    """The index of the first occurrence of `phrase` in `said`, or None."""
    width = len(phrase)
    starts = (at for at in range(len(said) - width + 1) if said[at : at + width] == phrase)
    return next(starts, None) if width else None


ANSWER = 20
"""Tokens of an answer that are searched for a fact."""
_SECONDS = 50.0
_LEAST = 6
"""Cases that are measured even after the time is up."""
_WHAT = "Checking moved KV"


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt, cold and warm. `kl`: of its next token, in nats; `moved`: tokens so served.

    `cold` and `warm`: which fact the answers gave (gold, decoy, neither); None without a question.
    """

    kind: str
    kl: float
    same_top: bool
    moved: int
    cold: str | None = None
    warm: str | None = None

    @property
    def misled(self) -> bool:
        """The warm answer gives the donor's fact, and the cold answer the prompt's own."""
        return self.cold == "gold" and self.warm == "decoy"


def measure(
    cases: Sequence[SelfCheckCase],
    config: EngineConfig,
    loaded: LoadedModel,
    progress: Progress = silent,
) -> list[Measured]:
    """Measure the cases that fit into the model's context, in order, until the time is up."""
    fitting = [case for case in cases if _longest(case) + ANSWER <= loaded.context_length]
    if not fitting:
        return []
    measurement = _Measurement(config, loaded, max(map(_longest, fitting)))
    deadline = time.monotonic() + _SECONDS
    measured: list[Measured] = []
    with _quiet_steps():
        for case in fitting:
            if len(measured) >= _LEAST and time.monotonic() > deadline:
                break
            progress(_WHAT, len(measured), len(fitting))
            measured.append(measurement.measure(case))
    progress(_WHAT, len(fitting), len(fitting))
    return measured


@contextmanager
def _quiet_steps() -> Iterator[None]:
    """Keep lines on single steps out of the log: they would look like clients' requests."""
    log = logging.getLogger("kvweave.engine")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)


def _longest(case: SelfCheckCase) -> int:
    return max(len(case.donor), len(case.recipient))


class _Measurement:
    """A small engine with the flags of the engine to be started, and a logit recorder inside."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, longest: int) -> None:
        page = config.cache.page_size
        # Donor and recipient, each with an answer and a partly filled page.
        room = 2 * (longest + ANSWER + page)
        # Events and the store belong to the engine that starts after the check.
        cache = replace(
            config.cache,
            max_total_tokens=-(-room // page) * page,
            kv_events_config=None,
            kv_store=None,
        )
        chunk = config.scheduler.chunked_prefill_size
        config = replace(config, cache=cache, scheduler=SchedulerConfig(chunked_prefill_size=chunk))
        components = build_components(config, loaded)
        self.recorder = LogitRecorder(components.runner)
        self.engine = Engine(config, loaded, replace(components, runner=self.recorder))
        self._decode = loaded.tokenizer.decode

    def measure(self, case: SelfCheckCase) -> Measured:
        tokens = ANSWER if case.gold is not None else 1
        self._serve(case.recipient, tokens, fuzzy=False)
        cold = self.recorder.trace()
        self._serve(case.donor, 1, fuzzy=False, afresh=True)
        moved = self._serve(case.recipient, tokens, fuzzy=True, afresh=False)
        warm = self.recorder.trace()
        facts = []
        for trace in (cold, warm) if case.gold is not None else ():
            text = self._decode(trace.tokens, skip_special_tokens=True)
            facts.append(verdict(text, case.gold or "", case.decoy))
        return Measured(
            case.kind,
            float(kl_divergence(cold.logits[:1], warm.logits[:1])[0]),
            bool(cold.logits[0].argmax() == warm.logits[0].argmax()),
            moved,
            *facts,
        )

    def _serve(self, prompt: IntArray, tokens: int, *, fuzzy: bool, afresh: bool = True) -> int:
        """Answer greedily, with an empty cache if `afresh`; returns the tokens that were moved."""
        if afresh:
            self.engine.flush_cache()
        self.recorder.begin()
        request = GenerateRequest(
            rid="self-check",
            prompt_ids=tuple(prompt.tolist()),
            sampling=SamplingParams(max_tokens=tokens, temperature=0.0),
            fuzzy=fuzzy,
        )
        self.engine.add(request)
        moved = 0
        while self.engine.has_work:
            for delta in self.engine.step():
                if delta.error is not None:
                    raise KvweaveError(f"the self-check failed: {delta.error}")
                usage = delta.usage
                moved = usage.moved_tokens + usage.paraphrase_tokens + usage.refreshed_tokens
        return moved


_TEXTS, _LENGTH = 6, 384


@dataclass(frozen=True, slots=True)
class QuantizationCost:
    """Over `tokens` next tokens: KL(float || quantised) in nats, perplexities, equal top tokens."""

    tokens: int
    kl_mean: float
    kl_worst: float
    perplexity: float
    float_perplexity: float
    same_top: float

    def __str__(self) -> str:
        return (
            f"Quantised weights, against float ones over {self.tokens:,} tokens: KL mean "
            f"{self.kl_mean:.5f}, worst {self.kl_worst:.4f}; perplexity {self.perplexity:.3f} "
            f"(float {self.float_perplexity:.3f}); same top token {self.same_top:.1%}"
        )


def quantization_cost(
    config: ModelConfig, loaded: LoadedModel, progress: Progress
) -> QuantizationCost | None:
    """None for a model without quantised weights. Loads the model a second time."""
    if not loaded.bits:
        return None
    plain = load_model(replace(config, quantization="none", dtype="float32"), progress)
    texts = [case.recipient[:_LENGTH] for case in build_cases(loaded.tokenizer)[:_TEXTS]]
    divergences, losses = [], []
    same = total = 0
    for text in texts:
        exact, found = _logits(plain, text), _logits(loaded, text)
        divergences.append(kl_divergence(exact, found))
        following = torch.from_numpy(text[1:].astype(np.int64))
        pair = (functional.cross_entropy(each[:-1], following) for each in (exact, found))
        losses.append(torch.stack(list(pair)))
        same += int((exact.argmax(-1) == found.argmax(-1)).sum())
        total += len(text)
    kl = torch.cat(divergences)
    float_perplexity, perplexity = torch.stack(losses).mean(0).exp().tolist()
    return QuantizationCost(
        total, float(kl.mean()), float(kl.max()), perplexity, float_perplexity, same / total
    )


def _logits(loaded: LoadedModel, text: IntArray) -> torch.Tensor:
    count = len(text)
    # Not the KV's own type: the weights are measured, without what fewer bits of KV cost.
    kv = KVTensors(loaded.layouts, count, 1, dtype=loaded.dtype, device=loaded.device)
    runner = ModelRunner(loaded, kv, get_backend("auto", loaded.device))
    at, pages = np.arange(count), np.arange(count, dtype=np.int32)
    ends = np.array([0, count], np.int32)
    batch = ForwardBatch(
        token_ids=text.astype(np.int64),
        positions=at,
        slots=at,
        query_start=ends,
        pages=pages,
        page_start=ends,
        page_size=1,
        logits_at=at,
    )
    return runner.forward(batch)
