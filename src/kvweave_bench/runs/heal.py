"""Bench: cost and gain of healing for a client that pauses between requests."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig
from kvweave.engine.async_engine import AsyncEngine
from kvweave.engine.engine import Engine
from kvweave.engine.types import Completion, EngineSnapshot, GenerateRequest, SamplingParams
from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray
from kvweave_bench.base import Bench
from kvweave_bench.measure import Against, quiet_collector, row
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting
from kvweave_bench.workloads.prompts import wrapped_documents

_LENGTH, _WRAPPER_ROOM, _OUTPUT = 1024, 128, 4
_PER_ROUND, _QUICK_PER_ROUND = 10, 2
_LONGEST_PAUSE, _QUICK_PAUSE = 0.5, 0.05
"""Seconds. A prompt of this length takes about one to heal, so that requests come in between."""
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    """The first prompt is the donor of the others, which come after these pauses."""

    prompts: list[IntArray]
    pauses: list[float]


def measure(setting: Setting) -> list[Row]:
    """Both variants serve the same rounds at the same pace, and take turns at going first."""
    rounds = [_make_round(setting) for _ in range(setting.n + 1)]  # one more to warm up
    variants = {name: _Variant(setting, name == "on") for name in ("off", "on")}
    asyncio.run(_serve(setting, rounds, variants))
    off, on = variants["off"], variants["on"]
    rows = [p95_ratio(on.first, off.first, setting.seed)]
    for name, variant in variants.items():
        rows += variant.rows(name, off)
    return rows


async def _serve(setting: Setting, rounds: Sequence[_Round], variants: dict[str, _Variant]) -> None:
    names = list(variants)
    with setting.progress("rounds", len(variants) * len(rounds)) as advance:
        try:
            for variant in variants.values():
                await variant.engine.start()
            for index, each in enumerate(rounds):
                for name in names if index % 2 else reversed(names):
                    with quiet_collector():
                        await variants[name].run(each, counted=index > 0)
                    advance()
        finally:
            for variant in variants.values():
                await variant.engine.stop()


class _Variant:
    """An engine on its own thread, as in a server, and the client that measures it."""

    def __init__(self, setting: Setting, heals: bool) -> None:
        # Room for a round, healed, and what runs; earlier rounds make way.
        cache = CacheConfig(
            prefix_cache_backend="fuzzy_match", max_total_tokens=(_PER_ROUND + 3) * _LENGTH
        )
        fuzzy = FuzzyConfig(heal=heals)
        config = EngineConfig(model=setting.model_config, cache=cache, fuzzy=fuzzy)
        config.validate()
        self.engine = AsyncEngine(Engine(config, setting.loaded))
        self.first: list[float] = []
        """Milliseconds from when a request was due to its first token."""
        self.again: list[float] = []
        """The same for the same prompts once more, after idle time."""
        self.exact: list[float] = []
        """For each of these, 1 if nothing but its last page was left to compute, or 0."""
        self._before = self._after = EngineSnapshot()
        self._ids = itertools.count()

    async def run(self, made: _Round, counted: bool) -> None:
        """A round, the idle time after it, and its prompts once more."""
        donor, *prompts = made.prompts
        await self._ask(donor, time.perf_counter())
        first = []
        for prompt, pause in zip(prompts, made.pauses, strict=True):
            due = time.perf_counter() + pause
            await asyncio.sleep(pause)
            first.append(await self._ask(prompt, due))
        while self.engine.snapshot().heals_waiting:
            await asyncio.sleep(0.02)
        again = [await self._ask(prompt, time.perf_counter()) for prompt in prompts]
        while self.engine.snapshot().heals_waiting:  # within its own turn
            await asyncio.sleep(0.02)
        self._after = self.engine.snapshot()
        if not counted:
            self._before = self._after
            return
        self.first += [milliseconds for milliseconds, _ in first]
        self.again += [milliseconds for milliseconds, _ in again]
        self.exact += [exact for _, exact in again]

    def rows(self, name: str, off: _Variant) -> list[Row]:
        before, after = self._before, self._after
        counts = {
            "healed_prompts": after.healed - before.healed,
            "healed_tokens": after.healed_tokens - before.healed_tokens,
            "preempted_heals": after.heals_preempted - before.heals_preempted,
            "dropped_heals": after.heals_dropped - before.heals_dropped,
        }
        n = len(self.first)
        return [
            row("first_token_ms", name, self.first, "ms", Against("off", off.first)),
            row("again_first_token_ms", name, self.again, "ms", Against("off", off.again)),
            Row(
                metric="again_exact",
                arm=name,
                value=float(np.mean(self.exact)),
                unit="share",
                n=n,
            ),
            *(
                Row(metric=metric, arm=name, value=float(count), unit=metric.split("_")[1], n=n)
                for metric, count in counts.items()
            ),
        ]

    async def _ask(self, prompt: IntArray, due: float) -> tuple[float, float]:
        """Milliseconds from `due` to the first token, and whether all but a page was exact."""
        request = GenerateRequest(
            rid=f"bench-{next(self._ids)}",
            prompt_ids=tuple(prompt.tolist()),
            sampling=SamplingParams(max_tokens=_OUTPUT, temperature=0.0, ignore_eos=True),
        )
        answer, first = Completion(), 0.0
        async for delta in self.engine.generate(request):
            first = first or time.perf_counter() - due
            answer.extend(delta)
        if answer.error is not None:
            raise KvweaveError(f"the engine gave up on a prompt: {answer.error}")
        size = CacheConfig().page_size
        whole = (len(prompt) - 1) // size * size
        return 1e3 * first, float(answer.usage.cached_tokens == whole)


def _make_round(setting: Setting) -> _Round:
    many, pause = _PER_ROUND, _LONGEST_PAUSE
    if setting.quick:
        many, pause = _QUICK_PER_ROUND, _QUICK_PAUSE
    document = setting.corpus.take(_LENGTH - _WRAPPER_ROOM)
    made = wrapped_documents(setting.corpus, document, many + 1, _WRAPPER_ROOM)
    pauses = setting.corpus.rng.uniform(0, pause, many)
    return _Round([each.tokens for each in made], pauses.tolist())


def p95_ratio(on: Sequence[float], off: Sequence[float], seed: int, together: int = 1) -> Row:
    """The 95th percentile of `off` by that of `on`; its interval from resampled pairs.

    Of `together` pairs in a row all are drawn or none, where they shared the machine's mood.
    """
    rng = np.random.default_rng(seed)
    rounds = np.arange(len(on)).reshape(-1, together)
    chosen = rounds[rng.integers(len(rounds), size=(_RESAMPLES, len(rounds)))]
    chosen = chosen.reshape(_RESAMPLES, len(on))
    slow = [np.percentile(np.asarray(figures)[chosen], 95, axis=1) for figures in (off, on)]
    p5, p95 = np.percentile(slow[0] / slow[1], (5, 95))
    ratio = float(np.percentile(off, 95) / np.percentile(on, 95))
    return Row(
        metric="first_token_p95_ratio",
        arm="on",
        value=ratio,
        unit="x",
        n=len(on),
        p5=float(p5),
        p95=float(p95),
        baseline="off",
        ratio=ratio,
    )


BENCH = Bench(
    name="heal",
    counts="rounds of 10 prompts",
    n=10,
    quick_n=1,
    measure=measure,
)
