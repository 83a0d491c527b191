"""Bench: groups of prompts that share an uncached prefix and arrive together."""

from __future__ import annotations

from collections import defaultdict

from kvweave.config import CacheConfig, EngineConfig, SchedulerConfig
from kvweave.kv.pool import IntArray
from kvweave_bench.base import Bench
from kvweave_bench.driver import Driver
from kvweave_bench.measure import Against, alternate, row
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting
from kvweave_bench.workloads.prompts import cold_group

_SIZE, _LENGTH, _SHARED, _PAGE = 16, 392, 384, 128
_OUTPUT = 8
# Admits all 16 prompts in one step, which is what makes them compute the same prefix 16 times.
_BUDGET = 8192

_VARIANTS = {
    "none": ("none", True),
    "hash": ("hash", True),
    "radix": ("radix", True),
    "radix-no-wait": ("radix", False),
}


def measure(setting: Setting) -> list[Row]:
    """Every variant serves the same new groups; variants take turns group by group."""
    warm_up = 1
    groups = [
        cold_group(setting.corpus, _SIZE, _LENGTH, _SHARED) for _ in range(setting.n + warm_up)
    ]
    variants = {name: _Variant(setting, groups, *spec) for name, spec in _VARIANTS.items()}
    runs = {name: variant.run for name, variant in variants.items()}
    with setting.progress("cold groups", len(variants) * len(groups)) as advance:
        alternate(runs, setting.n, warm_up=warm_up, progress=advance)
    return [
        each for name, variant in variants.items() for each in variant.rows(name, variants["none"])
    ]


class _Variant:
    def __init__(
        self, setting: Setting, groups: list[list[IntArray]], backend: str, wait: bool
    ) -> None:
        config = EngineConfig(
            model=setting.model_config,
            cache=CacheConfig(
                prefix_cache_backend=backend,
                page_size=_PAGE,
                cold_group_wait=wait,
                max_total_tokens=2 * _SIZE * (_LENGTH + _PAGE),
            ),
            scheduler=SchedulerConfig(chunked_prefill_size=_BUDGET),
        )
        self.driver = Driver(setting.loaded, config)
        self.groups = groups
        self.figures: dict[str, list[float]] = defaultdict(list)
        self.ids: list[list[list[int]]] = []

    def run(self, index: int) -> float:
        """Serve group `index` (-1: the warm-up's, which leaves no figures)."""
        answers = self.driver.serve(self.groups[index], max_tokens=_OUTPUT)
        total = max(each.token_seconds[-1] for each in answers)
        if index < 0:
            return total
        usages = [each.usage for each in answers]
        computed = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
        figures = self.figures
        figures["prefill_tokens_per_group"].append(computed)
        figures["first_token_ms"] += [1e3 * each.first_token_seconds for each in answers]
        figures["step_ms"] += [1e3 * each for each in self.driver.step_seconds]
        figures["peak_pages"].append(self.driver.peak_pages)
        figures["group_ms"].append(1e3 * total)
        self.ids.append([each.token_ids for each in answers])
        return total

    def rows(self, name: str, none: _Variant) -> list[Row]:
        def compared(metric: str, unit: str) -> Row:
            against = Against("none", none.figures[metric])
            return row(metric, name, self.figures[metric], unit, against)

        identical = Row(
            metric="identical_ids",
            arm=name,
            value=float(self.ids == none.ids),
            unit="1 or 0",
            n=_SIZE * len(self.ids),
            baseline="none",
        )
        return [
            compared("prefill_tokens_per_group", "tokens"),
            identical,
            compared("first_token_ms", "ms"),
            compared("group_ms", "ms"),
            row("step_ms", name, self.figures["step_ms"], "ms"),
            compared("peak_pages", "pages"),
        ]


BENCH = Bench(
    name="cold-groups",
    counts="groups",
    n=6,
    quick_n=1,
    measure=measure,
)
