"""Bench: the cost of looking for moved text in short prompts without any."""

from __future__ import annotations

from kvweave.config import CacheConfig, EngineConfig
from kvweave.kv.pool import IntArray
from kvweave_bench.base import Bench
from kvweave_bench.driver import Driver
from kvweave_bench.measure import Against, alternate, ratio_row, row
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting
from kvweave_bench.workloads.prompts import short_prompts

_VARIANTS = ("radix", "fuzzy_match")
_PER_ROUND = 16
_OUTPUT = 4
# Far below what all prompts need: caches fill up and evict, as they do in a server.
_POOL_TOKENS = 32_768


def measure(setting: Setting) -> list[Row]:
    """Both variants serve the same prompts in many small rounds and take turns at going first."""
    warm_up = 2
    rounds = [short_prompts(setting.corpus, _PER_ROUND) for _ in range(setting.n + warm_up)]
    variants = {name: _Variant(setting, name, rounds) for name in _VARIANTS}
    with setting.progress("rounds", len(variants) * len(rounds)) as advance:
        runs = {name: variant.run for name, variant in variants.items()}
        figures = alternate(runs, setting.n, warm_up=warm_up, progress=advance)
    radix, fuzzy = (figures[name] for name in _VARIANTS)
    served = variants["fuzzy_match"].served / (_PER_ROUND * len(rounds))
    against = Against("radix", radix, larger_is_better=True)
    return [
        ratio_row("throughput_ratio", "fuzzy_match", fuzzy, against),
        Row(
            metric="served",
            arm="fuzzy_match",
            value=served,
            unit="share",
            n=_PER_ROUND * len(rounds),
        ),
        row("throughput", "radix", radix, "prompts/s"),
        row("throughput", "fuzzy_match", fuzzy, "prompts/s", against),
    ]


class _Variant:
    def __init__(self, setting: Setting, backend: str, rounds: list[list[IntArray]]) -> None:
        cache = CacheConfig(prefix_cache_backend=backend, max_total_tokens=_POOL_TOKENS)
        self.driver = Driver(setting.loaded, EngineConfig(model=setting.model_config, cache=cache))
        self.rounds = rounds
        self.served = 0

    def run(self, index: int) -> float:
        """Prompts per second of one round."""
        answers = self.driver.serve(self.rounds[index], max_tokens=_OUTPUT)
        self.served += sum(answer.usage.moved_tokens > 0 for answer in answers)
        return len(answers) / max(answer.token_seconds[-1] for answer in answers)


BENCH = Bench(
    name="unrelated",
    counts="rounds of 16 prompts",
    n=160,
    quick_n=3,
    measure=measure,
)
