"""Bench: the cost of the semantic provider for prompts that gain nothing from it."""

from __future__ import annotations

import time

import numpy as np

from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig
from kvweave.errors import KvweaveError
from kvweave.fuzzy.backend import FuzzyCache
from kvweave.kv.pool import IntArray
from kvweave_bench.base import Bench
from kvweave_bench.driver import Driver
from kvweave_bench.measure import Against, row
from kvweave_bench.report import Row
from kvweave_bench.runs.heal import p95_ratio
from kvweave_bench.setting import Setting

_VARIANTS = {"off": "spans", "on": "semantic"}
_LENGTH, _QUICK_LENGTH = 256, 64
_PER_ROUND = 4
"""Few, so that the variants serve the same prompt within seconds of each other."""
_SHORT_PAUSE, _LONG_PAUSE = 0.5, (1.0, 1.4)
"""Seconds between two prompts: at most the first, when nothing is embedded; or within the others,
when the engine has just come to count as idle, and the donors before are being embedded."""
_POOL_TOKENS = 16_384
_PATIENCE = 120.0


def measure(setting: Setting) -> list[Row]:
    """Both variants serve the same unrelated prompts at the same pace, round by round, in turn.

    Every other prompt comes while the ones before it are embedded, if they are.
    """
    length = _QUICK_LENGTH if setting.quick else _LENGTH
    variants = {name: _Variant(setting, provider) for name, provider in _VARIANTS.items()}
    corpus = setting.corpus
    with setting.progress("rounds", len(variants) * (setting.n + 1)) as advance:
        for number in range(setting.n + 1):  # the first warms up
            prompts = [corpus.take(length) for _ in range(_PER_ROUND)]
            pauses = [_pause(corpus.rng, place) for place in range(_PER_ROUND)]
            names = list(variants) if number % 2 else list(variants)[::-1]
            for name in names:
                variants[name].run(
                    prompts, [0.0] * _PER_ROUND if setting.quick else pauses, number > 0
                )
                advance()
    off, on = variants["off"], variants["on"]
    against = Against("off", off.first)
    return [
        p95_ratio(on.first, off.first, setting.seed, together=_PER_ROUND),
        row("first_token_ms", "off", off.first, "ms"),
        row("first_token_ms", "on", on.first, "ms", against),
        *on.rows(),
    ]


def _pause(rng: np.random.Generator, place: int) -> float:
    shortest, longest = _LONG_PAUSE if place % 2 else (0.0, _SHORT_PAUSE)
    return float(rng.uniform(shortest, longest))


class _Variant:
    def __init__(self, setting: Setting, provider: str) -> None:
        cache = CacheConfig(prefix_cache_backend="fuzzy_match", max_total_tokens=_POOL_TOKENS)
        fuzzy = FuzzyConfig(provider=provider)
        self.driver = Driver(
            setting.loaded, EngineConfig(model=setting.model_config, cache=cache, fuzzy=fuzzy)
        )
        self.first: list[float] = []
        """Milliseconds to the first token."""

    @property
    def cache(self) -> FuzzyCache:
        cache = self.driver.engine.cache
        assert isinstance(cache, FuzzyCache)
        return cache

    def run(self, prompts: list[IntArray], pauses: list[float], counted: bool) -> None:
        """One round, including its background work."""
        for prompt, pause in zip(prompts, pauses, strict=True):
            time.sleep(pause)
            [answer] = self.driver.serve([prompt], max_tokens=2)
            if counted:
                self.first.append(1e3 * answer.first_token_seconds)
        if not self.cache.settle(_PATIENCE):
            raise KvweaveError("the embedder does not come to rest")

    def rows(self) -> list[Row]:
        """Donors' sentences embedded, and the prompts' own: those were compared, or waited for."""
        counts = self.cache.inspector.stats().provider
        n = len(self.first)
        return [
            Row(metric="embedded", arm="on", value=counts["embedded"], unit="sentences", n=n),
            Row(
                metric="compared",
                arm="on",
                value=counts["compared"] + counts["not_ready"],
                unit="sentences",
                n=n,
            ),
        ]


BENCH = Bench(
    name="semantic",
    counts="rounds of 4 prompts",
    n=30,
    quick_n=1,
    measure=measure,
)
