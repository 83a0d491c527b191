"""The engine against plain transformers: long contexts, short additions, many requests at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import numpy as np

from kvweave.bench.base import Bench
from kvweave.bench.driver import Answer, Driver
from kvweave.bench.measure import Against, alternate, row
from kvweave.bench.reference import Reference, plain_transformers, tuned_transformers
from kvweave.bench.report import Row
from kvweave.bench.setting import Setting
from kvweave.config import CacheConfig, EngineConfig

_CONTEXT, _QUICK_CONTEXT = 4096, 512
_APPENDED = 15
_DECODED = 16
_TOGETHER, _TOGETHER_PROMPT, _TOGETHER_OUTPUT = 8, 128, 32
_OURS, _PLAIN, _TUNED, _ALONE = (
    "kvweave",
    "transformers",
    "transformers, tuned",
    "one after another",
)

_References = Mapping[str, Reference]
"""transformers twice: as anyone gets it, and with the memory settings that kvweave makes."""


def measure(setting: Setting) -> list[Row]:
    """Three figures against transformers with its dynamic cache, and one against ourselves."""
    context = _QUICK_CONTEXT if setting.quick else _CONTEXT
    with plain_transformers(setting.loaded) as plain:
        references = {_PLAIN: plain, _TUNED: tuned_transformers(setting.loaded)}
        rows = _prefill(setting, references, context)
        rows += _decode_and_append(setting, references, context)
    return rows + _decode_together(setting)


def _prefill(setting: Setting, references: _References, context: int) -> list[Row]:
    """A prompt that nobody has seen, until its first token is known."""
    warm_up = 1
    prompts = [setting.corpus.take(context) for _ in range(setting.n + warm_up)]
    driver = _driver(setting, "none", 2 * context)

    def ours(index: int) -> float:
        return driver.serve([prompts[index]])[0].first_token_seconds

    def theirs(model: Reference, index: int) -> float:
        return model.prefill(prompts[index])

    return _raced(setting, f"prefill_{context}", ours, theirs, references, warm_up)


def _decode_and_append(setting: Setting, references: _References, context: int) -> list[Row]:
    """One long context that all arms keep cached: tokens decoded after it, prompts added to it."""
    warm_up = 1
    prefix = setting.corpus.take(context)
    added = [setting.corpus.take(_APPENDED) for _ in range(setting.n + warm_up)]
    driver = _driver(setting, "radix", 2 * context)
    driver.serve([prefix])
    for model in references.values():
        model.prefill(prefix)

    def decode(_: int) -> float:
        return _per_token(driver.serve([prefix], max_tokens=_DECODED + 1)[0])

    def their_decode(model: Reference, _: int) -> float:
        return float(np.median(model.decode(_DECODED)))

    def append(index: int) -> float:
        prompt = np.concatenate([prefix, added[index]])
        return driver.serve([prompt])[0].first_token_seconds

    def their_append(model: Reference, index: int) -> float:
        return model.append(added[index])

    decoded, appended = f"decode_after_{context}", f"append_{_APPENDED}_after_{context}"
    rows = _raced(setting, decoded, decode, their_decode, references, warm_up)
    return rows + _raced(setting, appended, append, their_append, references, warm_up)


def _raced(
    setting: Setting,
    metric: str,
    ours: Callable[[int], float],
    theirs: Callable[[Reference, int], float],
    references: _References,
    warm_up: int,
) -> list[Row]:
    """Milliseconds of all arms in alternation, compared with transformers as anyone gets it."""
    arms = {_OURS: ours} | {name: partial(theirs, model) for name, model in references.items()}
    with setting.progress(metric, len(arms) * (setting.n + warm_up)) as advance:
        taken = alternate(arms, setting.n, warm_up=warm_up, progress=advance)
    figures = {name: [1e3 * each for each in times] for name, times in taken.items()}
    against = Against(_PLAIN, figures[_PLAIN])
    return [
        row(metric, name, times, "ms", None if name == _PLAIN else against)
        for name, times in figures.items()
    ]


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
