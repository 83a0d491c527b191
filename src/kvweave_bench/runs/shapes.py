"""Bench: nine ways in which earlier text returns; the share served and the share possible."""

from __future__ import annotations

from kvweave.config import CacheConfig, EngineConfig
from kvweave_bench.base import Bench
from kvweave_bench.driver import Driver
from kvweave_bench.identity import Donors, served_positions
from kvweave_bench.measure import row
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting
from kvweave_bench.workloads.shapes import SHAPES

_LENGTH, _QUICK_LENGTH = 1536, 480
# Two donors of thrice the length and a recipient: nothing is evicted that the oracle counts on.
_ROOM_PER_CASE = 8


def measure(setting: Setting) -> list[Row]:
    """Each shape has an engine of its own, in which earlier cases' prompts stay cached."""
    length = _QUICK_LENGTH if setting.quick else _LENGTH
    rows: list[Row] = []
    with setting.progress("shapes", len(SHAPES) * setting.n) as advance:
        for name, build in SHAPES.items():
            room = _ROOM_PER_CASE * length * setting.n
            cache = CacheConfig(prefix_cache_backend="fuzzy_match", max_total_tokens=room)
            driver = Driver(setting.loaded, EngineConfig(model=setting.model_config, cache=cache))
            donors = Donors()
            served, oracle, identity = [], [], []
            for _ in range(setting.n):
                case = build(setting.corpus, length)
                for donor in case.donors:
                    donors.add(driver.serve([donor])[0])
                (answer,) = driver.serve([case.recipient])
                served.append(float(served_positions(answer).mean()))
                oracle.append(donors.oracle_share(case.recipient))
                identity.append(donors.identity(answer))
                donors.add(answer)
                advance()
            rows += _rows(name, served, oracle, identity)
    return rows


def _rows(
    variant: str, served: list[float], oracle: list[float], identity: list[float]
) -> list[Row]:
    return [
        row("served_share", variant, served, "share"),
        row("oracle_share", variant, oracle, "share"),
        Row(
            metric="token_identity",
            arm=variant,
            value=min(identity),  # one wrong case must not hide in a median
            unit="share",
            n=len(identity),
        ),
    ]


BENCH = Bench(
    name="shapes",
    counts="cases of each shape",
    n=6,
    quick_n=1,
    measure=measure,
)
