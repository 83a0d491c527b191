"""The engine against plain transformers: long contexts, short additions, many requests at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvweave.bench.base import Bench
from kvweave.bench.driver import Answer, Driver
from kvweave.bench.measure import Against, alternate, row
from kvweave.bench.reference import Reference
from kvweave.bench.report import Row
from kvweave.bench.setting import Setting
from kvweave.config import CacheConfig, EngineConfig

_CONTEXT, _QUICK_CONTEXT = 4096, 512
_APPENDED = 15
_DECODED = 16
_TOGETHER, _TOGETHER_PROMPT, _TOGETHER_OUTPUT = 8, 128, 32
_OURS, _THEIRS, _ALONE = "kvweave", "transformers", "one after another"


def measure(setting: Setting) -> list[Row]:
    """Three figures against transformers with its dynamic cache, and one against ourselves."""
    context = _QUICK_CONTEXT if setting.quick else _CONTEXT
    return [
        *_prefill(setting, context),
        *_decode_and_append(setting, context),
        *_decode_together(setting),
    ]


def _prefill(setting: Setting, context: int) -> list[Row]:
    """A prompt that nobody has seen, until its first token is known."""
    warm_up = 1
    prompts = [setting.corpus.take(context) for _ in range(setting.n + warm_up)]
    driver = _driver(setting, "none", 2 * context)
    reference = Reference(setting.loaded)
    arms = {
        _OURS: lambda index: 1e3 * driver.serve([prompts[index]])[0].first_token_seconds,
        _THEIRS: lambda index: 1e3 * reference.prefill(prompts[index]),
    }
    with setting.progress(f"prefill of {context} tokens", 2 * len(prompts)) as advance:
        figures = alternate(arms, setting.n, warm_up=warm_up, progress=advance)
    return _compared(f"prefill_{context}", figures, "ms")


def _decode_and_append(setting: Setting, context: int) -> list[Row]:
    """One long context that both arms keep cached: tokens decoded after it, prompts added to it."""
    warm_up = 1
    prefix = setting.corpus.take(context)
    added = [setting.corpus.take(_APPENDED) for _ in range(setting.n + warm_up)]
    driver = _driver(setting, "radix", 2 * context)
    reference = Reference(setting.loaded)
    driver.serve([prefix])
    reference.prefill(prefix)

    decode = {
        _OURS: lambda _: 1e3 * _per_token(driver.serve([prefix], max_tokens=_DECODED + 1)[0]),
        _THEIRS: lambda _: 1e3 * float(np.median(reference.decode(_DECODED))),
    }
    append = {
        _OURS: lambda index: 1e3 * _first_token(driver, np.concatenate([prefix, added[index]])),
        _THEIRS: lambda index: 1e3 * reference.append(added[index]),
    }
    rows = []
    with setting.progress(f"after {context} tokens", 4 * len(added)) as advance:
        for name, arms in (("decode_after", decode), (f"append_{_APPENDED}_after", append)):
            figures = alternate(arms, setting.n, warm_up=warm_up, progress=advance)
            rows += _compared(f"{name}_{context}", figures, "ms")
    return rows


def _decode_together(setting: Setting) -> list[Row]:
    """Tokens per second of several answers decoded in one batch, and of the same one by one."""
    warm_up = 1
    prompts = [setting.corpus.take(_TOGETHER_PROMPT) for _ in range(_TOGETHER)]
    driver = _driver(setting, "none", 2 * _TOGETHER * (_TOGETHER_PROMPT + _TOGETHER_OUTPUT))

    def together(_: int) -> float:
        answers = driver.serve(prompts, max_tokens=_TOGETHER_OUTPUT)
        began = max(each.first_token_seconds for each in answers)
        return _DECODE_STEPS * _TOGETHER / (max(each.token_seconds[-1] for each in answers) - began)

    def alone(_: int) -> float:
        answers = [driver.serve([prompt], max_tokens=_TOGETHER_OUTPUT)[0] for prompt in prompts]
        taken = sum(each.token_seconds[-1] - each.first_token_seconds for each in answers)
        return _DECODE_STEPS * _TOGETHER / taken

    metric = f"decode_batch_{_TOGETHER}"
    with setting.progress(f"{_TOGETHER} answers", 2 * (setting.n + warm_up)) as advance:
        arms = {"together": together, _ALONE: alone}
        figures = alternate(arms, setting.n, warm_up=warm_up, progress=advance)
    against = Against(_ALONE, figures[_ALONE], larger_is_better=True)
    return [
        row(metric, "together", figures["together"], "tokens/s", against),
        row(metric, _ALONE, figures[_ALONE], "tokens/s"),
    ]


def _compared(metric: str, figures: dict[str, list[float]], unit: str) -> list[Row]:
    theirs = figures[_THEIRS]
    return [
        row(metric, _OURS, figures[_OURS], unit, Against(_THEIRS, theirs)),
        row(metric, _THEIRS, theirs, unit),
    ]


def _first_token(driver: Driver, prompt: np.ndarray) -> float:
    return driver.serve([prompt])[0].first_token_seconds


def _per_token(answer: Answer) -> float:
    """Median seconds between two tokens, the first left out: it belongs to the prompt."""
    return float(np.median([after - before for before, after in pairwise(answer.token_seconds)]))


_DECODE_STEPS = _TOGETHER_OUTPUT - 1


def _driver(setting: Setting, backend: str, slots: int) -> Driver:
    cache = CacheConfig(prefix_cache_backend=backend, max_total_tokens=slots)
    return Driver(setting.loaded, EngineConfig(model=setting.model_config, cache=cache))


BENCH = Bench(
    name="engine",
    summary="Prefill, decoding and appending against transformers; decoding together against alone",
    counts="rounds",
    n=7,
    quick_n=1,
    measure=measure,
)
