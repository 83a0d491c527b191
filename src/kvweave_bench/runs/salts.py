"""Whether the clock tells one tenant what another has cached or stored, behind another salt.

Every round, tenant A sends one text, and tenant B asks for that and for one that nobody sent, in
turns. A ratio of 1 tells B nothing. That the clock could tell is seen beside it: B's own text.
With --kv-store, the pool is emptied in between, and what is timed is only the look-up in the store.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvweave.config import CacheConfig, EngineConfig
from kvweave.engine.types import GenerateRequest, SamplingParams
from kvweave.errors import KvweaveError
from kvweave_bench.base import Bench
from kvweave_bench.driver import Driver
from kvweave_bench.measure import Against, alternate, paired_ratios, row
from kvweave_bench.quality.metrics import bootstrap
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting

_LENGTH, _QUICK_LENGTH = 512, 128
_WARM_UP = 2
_NEVER, _ANOTHERS, _OWN = "never cached", "cached by another", "cached by oneself"


_SENDERS = {_NEVER: None, _ANOTHERS: "A", _OWN: "B"}


def measure(setting: Setting) -> list[Row]:
    """First tokens and look-ups of B's prompts by who had sent them, paired by round."""
    length = _QUICK_LENGTH if setting.quick else _LENGTH
    driver = Driver(setting.loaded, _config(setting, length, None))
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        stored = Driver(setting.loaded, _config(setting, length, folder))
        rows = _measured(
            setting, "first_token", lambda sender, _: _first_token(setting, driver, length, sender)
        )
        rows += _measured(
            setting, "store_lookup", lambda sender, _: _lookup(setting, stored, length, sender)
        )
        stored.engine.close()
    return rows


def _config(setting: Setting, length: int, folder: str | None) -> EngineConfig:
    cache = CacheConfig(
        prefix_cache_backend="fuzzy_match", max_total_tokens=32 * length, kv_store=folder
    )
    return EngineConfig(model=setting.model_config, cache=cache)


def _first_token(setting: Setting, driver: Driver, length: int, sender: str | None) -> float:
    prompt = setting.corpus.take(length)
    # Without a sender something else is sent, so all variants do the same work before.
    driver.serve([prompt if sender else setting.corpus.take(length)], salt=sender or "A")
    (answer,) = driver.serve([prompt], salt="B")
    return 1e3 * answer.first_token_seconds


def _lookup(setting: Setting, driver: Driver, length: int, sender: str | None) -> float:
    """Milliseconds until B's request waits for the store no longer; reading included."""
    engine, prompt = driver.engine, setting.corpus.take(length)
    store = engine.components.store
    if store is None:
        raise KvweaveError("the store could not be opened")
    driver.serve([prompt if sender else setting.corpus.take(length)], salt=sender or "A")
    while store.saving:
        if not store.pump(1.0):
            store.wait(0.01)
    engine.flush_cache()
    asked = GenerateRequest(
        rid="asked",
        prompt_ids=tuple(prompt.tolist()),
        sampling=SamplingParams(max_tokens=1),
        cache_salt="B",
    )
    began = time.perf_counter()
    engine.add(asked)
    while store.figures()["waiting_loads"]:
        if not store.pump(1.0):
            store.wait(0.01)
    took = time.perf_counter() - began
    engine.abort("asked")
    return 1e3 * took


def _measured(setting: Setting, name: str, ask: Callable[[str | None, int], float]) -> list[Row]:
    variants = {variant: partial(ask, sender) for variant, sender in _SENDERS.items()}
    with setting.progress(name, len(variants) * (setting.n + _WARM_UP)) as advance:
        figures = alternate(variants, setting.n, warm_up=_WARM_UP, progress=advance)
    rows = [row(f"{name}_ms", variant, figures[variant], "ms") for variant in variants]
    for variant in (_ANOTHERS, _OWN):
        rows += [_ratio(f"{name}_ratio", variant, figures), _later(name, variant, figures)]
    return rows


def _ratio(metric: str, variant: str, figures: dict[str, list[float]]) -> Row:
    """The median of the rounds' ratios; p5 and p95 are the ends of its 90 % interval."""
    ratios = paired_ratios(figures[variant], Against(_NEVER, figures[_NEVER]))
    of = bootstrap(ratios, "median")
    return Row(
        metric=metric,
        arm=variant,
        value=of.value,
        unit="x",
        n=of.n,
        p5=of.low,
        p95=of.high,
        baseline=_NEVER,
        ratio=of.value,
    )


def _later(name: str, variant: str, figures: dict[str, list[float]]) -> Row:
    """How often this is slower than what was never sent, over all pairs: 0.5 tells nothing.

    (Mann and Whitney's statistic: it sees any shift of one distribution against the other.)
    """
    ours, never = np.array(figures[variant])[:, None], np.array(figures[_NEVER])[None]
    share = float(np.mean(ours > never) + np.mean(ours == never) / 2)
    n = len(figures[variant])
    return Row(metric=f"{name}_later", arm=variant, value=share, unit="share of pairs", n=n)


BENCH = Bench(
    name="salts",
    counts="rounds",
    n=60,
    quick_n=2,
    measure=measure,
)
