"""Bench: one document behind other wrappers; tokens reused, their identity, time saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvweave.config import CacheConfig, EngineConfig
from kvweave_bench.base import Bench
from kvweave_bench.driver import Driver
from kvweave_bench.identity import Donors, served_positions
from kvweave_bench.measure import Against, ratio_row, row
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting
from kvweave_bench.workloads.prompts import Wrapped, wrapped_documents

_LENGTHS = {"1K": 1024, "2K": 2048, "4K": 4096, "8K": 8192}
_QUICK_LENGTHS = {"512": 512}
# Instruction and question together; the rest of each length is the document.
_WRAPPER_ROOM = 128


@dataclass(slots=True)
class _Findings:
    served: list[float] = field(default_factory=list)
    document_share: list[float] = field(default_factory=list)
    token_identity: list[float] = field(default_factory=list)
    cold_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)


def measure(setting: Setting) -> list[Row]:
    """For each length, n prompts after one donor, each paired with its own cold run just before."""
    lengths = _QUICK_LENGTHS if setting.quick else _LENGTHS
    rows: list[Row] = []
    with setting.progress("prompts, cold and warm", len(lengths) * (setting.n + 1)) as advance:
        for name, length in lengths.items():
            document = setting.corpus.take(length - _WRAPPER_ROOM - 1)  # 1: the first token
            prompts = wrapped_documents(setting.corpus, document, setting.n + 1, _WRAPPER_ROOM)
            cold = Driver(setting.loaded, _config(setting, "none", length))
            warm = Driver(setting.loaded, _config(setting, "fuzzy_match", length))
            rows += _rows(name, _pairs(prompts, cold, warm, advance))
    return rows


def _pairs(
    prompts: list[Wrapped], cold: Driver, warm: Driver, advance: Callable[[], None]
) -> _Findings:
    donors = Donors()
    found = _Findings()
    for index, prompt in enumerate(prompts):
        (before,) = cold.serve([prompt.tokens])
        (after,) = warm.serve([prompt.tokens])
        if index > 0:  # the first is the donor, and the warm-up of both variants
            found.served.append(float(after.usage.moved_tokens > 0))
            found.document_share.append(
                float(served_positions(after)[prompt.start : prompt.end].mean())
            )
            found.token_identity.append(donors.identity(after))
            found.cold_ms.append(1e3 * before.first_token_seconds)
            found.warm_ms.append(1e3 * after.first_token_seconds)
        donors.add(after)
        advance()
    return found


def _rows(variant: str, found: _Findings) -> list[Row]:
    n = len(found.served)
    cold = Against("cold", found.cold_ms)
    return [
        # Counts and identity: a mean and a minimum, since one bad case must not hide in a median.
        Row(metric="served", arm=variant, value=sum(found.served) / n, unit="share", n=n),
        row("document_share", variant, found.document_share, "share"),
        Row(
            metric="token_identity",
            arm=variant,
            value=min(found.token_identity),
            unit="share",
            n=n,
        ),
        ratio_row("first_token_speedup", variant, found.warm_ms, cold),
        row("first_token_ms", variant, found.warm_ms, "ms"),
        row("first_token_ms", f"{variant}, cold", found.cold_ms, "ms"),
    ]


def _config(setting: Setting, backend: str, length: int) -> EngineConfig:
    # Room for the donor, and for the prompt that is served from it.
    cache = CacheConfig(prefix_cache_backend=backend, max_total_tokens=3 * length)
    return EngineConfig(model=setting.model_config, cache=cache)


BENCH = Bench(
    name="moved",
    counts="prompts of each length",
    n=24,
    quick_n=2,
    measure=measure,
)
