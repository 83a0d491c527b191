"""Bench: the engine against plain transformers on long contexts and many requests at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np

from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig
from kvweave_bench.base import Bench
from kvweave_bench.driver import Driver, per_token
from kvweave_bench.measure import Against, alternate, row
from kvweave_bench.reference import Reference, plain_transformers
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting
from kvweave_bench.workloads.prompts import wrapped_documents

_CONTEXT, _QUICK_CONTEXT = 4096, 512
_APPENDED = 15
_DECODED = 16
_WARM_UP = 1
_TOGETHER, _TOGETHER_PROMPT, _TOGETHER_OUTPUT = 8, 128, 32
_DECODE_STEPS = _TOGETHER_OUTPUT - 1
_MOVED, _WRAPPER_ROOM = 1024, 128
_BUSY, _ONE_THREAD, _IDLE = "beside a busy process", "one thread, idle", "all threads, idle"
_OURS, _THEIRS, _ALONE = "kvweave", "transformers", "one after another"


def measure(setting: Setting) -> list[Row]:
    """Three figures against transformers with its dynamic cache, and one against ourselves."""
    if setting.options.neighbour:
        return _beside_a_neighbour(setting)
    context = _QUICK_CONTEXT if setting.quick else _CONTEXT
    with plain_transformers(setting.loaded) as reference:
        rows = _prefill(setting, reference, context)
        rows += _decode_and_append(setting, reference, context)
    return rows + _decode_together(setting)


def _prefill(setting: Setting, reference: Reference, context: int) -> list[Row]:
    """The time to the first token of new prompts."""
    prompts = [setting.corpus.take(context) for _ in range(setting.n + _WARM_UP)]
    driver = _driver(setting, "none", 2 * context)

    def ours(index: int) -> float:
        return driver.serve([prompts[index]])[0].first_token_seconds

    def theirs(index: int) -> float:
        return reference.prefill(prompts[index])

    return _raced(setting, f"prefill_{context}", ours, theirs)


def _decode_and_append(setting: Setting, reference: Reference, context: int) -> list[Row]:
    """Decodes tokens after, and adds prompts to, one long context that both variants cached."""
    prefix = setting.corpus.take(context)
    added = [setting.corpus.take(_APPENDED) for _ in range(setting.n + _WARM_UP)]
    driver = _driver(setting, "radix", 2 * context)
    driver.serve([prefix])
    reference.prefill(prefix)

    def decode(_: int) -> float:
        return per_token(driver.serve([prefix], max_tokens=_DECODED + 1)[0])

    def their_decode(_: int) -> float:
        return float(np.median(reference.decode(_DECODED)))

    def append(index: int) -> float:
        prompt = np.concatenate([prefix, added[index]])
        return driver.serve([prompt])[0].first_token_seconds

    def their_append(index: int) -> float:
        return reference.append(added[index])

    rows = _raced(setting, f"decode_after_{context}", decode, their_decode)
    return rows + _raced(setting, f"append_{_APPENDED}_after_{context}", append, their_append)


def _raced(
    setting: Setting, metric: str, ours: Callable[[int], float], theirs: Callable[[int], float]
) -> list[Row]:
    """Milliseconds of both variants in alternation."""
    with setting.progress(metric, 2 * (setting.n + _WARM_UP)) as advance:
        variants = {_OURS: ours, _THEIRS: theirs}
        taken = alternate(variants, setting.n, warm_up=_WARM_UP, progress=advance)
    our_ms, their_ms = ([1e3 * each for each in taken[name]] for name in (_OURS, _THEIRS))
    return [
        row(metric, _OURS, our_ms, "ms", Against(_THEIRS, their_ms)),
        row(metric, _THEIRS, their_ms, "ms"),
    ]


def _decode_together(setting: Setting) -> list[Row]:
    """Tokens per second of several answers decoded in one batch, and of the same one by one."""
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
    with setting.progress(f"{_TOGETHER} answers", 2 * (setting.n + _WARM_UP)) as advance:
        variants = {"together": together, _ALONE: alone}
        figures = alternate(variants, setting.n, warm_up=_WARM_UP, progress=advance)
    against = Against(_ALONE, figures[_ALONE], larger_is_better=True)
    return [
        row(metric, "together", figures["together"], "tokens/s", against),
        row(metric, _ALONE, figures[_ALONE], "tokens/s"),
    ]


def _beside_a_neighbour(setting: Setting) -> list[Row]:
    """A moved prompt and decoding while another process is busy, as many threads as the engine
    likes; against one thread that has the machine for itself.
    """
    document = setting.corpus.take(_MOVED - _WRAPPER_ROOM - 1)
    rounds = setting.n + _WARM_UP
    prompts = wrapped_documents(setting.corpus, document, rounds + 1, _WRAPPER_ROOM)
    drivers = {}
    for name, threads in ((_BUSY, None), (_ONE_THREAD, 1), (_IDLE, None)):
        config = EngineConfig(
            model=replace(setting.model_config, threads=threads),
            cache=CacheConfig(prefix_cache_backend="fuzzy_match", max_total_tokens=16 * _MOVED),
            fuzzy=FuzzyConfig(self_check="off"),
        )
        drivers[name] = Driver(setting.loaded, config)
        drivers[name].serve([prompts[-1].tokens])  # the donor
    decode_ms: dict[str, list[float]] = {name: [] for name in drivers}

    def measured(name: str) -> Callable[[int], float]:
        def first_token(index: int) -> float:
            with busy_process() if name == _BUSY else nullcontext():
                (answer,) = drivers[name].serve([prompts[index].tokens], max_tokens=_DECODED + 1)
            if index >= 0:
                taken = answer.token_seconds[-1] - answer.first_token_seconds
                decode_ms[name].append(1e3 * taken / _DECODED)
            return 1e3 * answer.first_token_seconds

        return first_token

    with setting.progress("moved prompts", 3 * rounds) as advance:
        variants = {name: measured(name) for name in drivers}
        first_ms = alternate(variants, setting.n, warm_up=_WARM_UP, progress=advance)
    rows = []
    for metric, taken in (("moved_1024", first_ms), (f"decode_{_DECODED}", decode_ms)):
        against = Against(_ONE_THREAD, taken[_ONE_THREAD])
        rows += [row(metric, name, taken[name], "ms", against) for name in (_BUSY, _IDLE)]
        rows.append(row(metric, _ONE_THREAD, taken[_ONE_THREAD], "ms"))
    return rows


@contextmanager
def busy_process() -> Iterator[None]:
    """Another process that never waits, from before the block until after it."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


def _driver(setting: Setting, backend: str, slots: int) -> Driver:
    cache = CacheConfig(prefix_cache_backend=backend, max_total_tokens=slots)
    return Driver(setting.loaded, EngineConfig(model=setting.model_config, cache=cache))


BENCH = Bench(
    name="engine",
    counts="rounds",
    n=7,
    quick_n=1,
    measure=measure,
    takes=("neighbour",),
)
