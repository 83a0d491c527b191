"""Whether the clock tells one tenant what another has cached: first tokens, behind another salt.

Every round, tenant A sends one text, and tenant B asks for that and for one that nobody sent, in
turns. A ratio of 1 tells B nothing. That the clock could tell is seen beside it: B's own text.
"""

from __future__ import annotations

from functools import partial

from kvweave.config import CacheConfig, EngineConfig
from kvweave_bench.base import Bench
from kvweave_bench.driver import Driver
from kvweave_bench.measure import Against, alternate, paired_ratios, row
from kvweave_bench.quality.metrics import bootstrap
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting

_LENGTH, _QUICK_LENGTH = 512, 64
_WARM_UP = 2
_NEVER, _ANOTHERS, _OWN = "never cached", "cached by another", "cached by oneself"


def measure(setting: Setting) -> list[Row]:
    """First tokens of B's prompts by who had cached them, paired by round."""
    length = _QUICK_LENGTH if setting.quick else _LENGTH
    cache = CacheConfig(prefix_cache_backend="fuzzy_match", max_total_tokens=32 * length)
    driver = Driver(setting.loaded, EngineConfig(model=setting.model_config, cache=cache))

    def asked(sender: str | None, _: int) -> float:
        prompt = setting.corpus.take(length)
        # Without a sender something else is sent, so all variants do the same work before.
        driver.serve([prompt if sender else setting.corpus.take(length)], salt=sender or "A")
        (answer,) = driver.serve([prompt], salt="B")
        return 1e3 * answer.first_token_seconds

    senders = {_NEVER: None, _ANOTHERS: "A", _OWN: "B"}
    variants = {variant: partial(asked, sender) for variant, sender in senders.items()}
    with setting.progress("prompts", len(variants) * (setting.n + _WARM_UP)) as advance:
        figures = alternate(variants, setting.n, warm_up=_WARM_UP, progress=advance)
    rows = [row("first_token_ms", variant, figures[variant], "ms") for variant in variants]
    return rows + [_ratio(variant, figures) for variant in (_ANOTHERS, _OWN)]


def _ratio(variant: str, figures: dict[str, list[float]]) -> Row:
    """The median of the rounds' ratios; p5 and p95 are the ends of its 90 % interval."""
    ratios = paired_ratios(figures[variant], Against(_NEVER, figures[_NEVER]))
    of = bootstrap(ratios, "median")
    return Row(
        metric="first_token_ratio",
        arm=variant,
        value=of.value,
        unit="x",
        n=of.n,
        p5=of.low,
        p95=of.high,
        baseline=_NEVER,
        ratio=of.value,
    )


BENCH = Bench(
    name="salts",
    summary="What the clock tells one tenant of another's cache",
    counts="rounds",
    n=60,
    quick_n=2,
    measure=measure,
)
