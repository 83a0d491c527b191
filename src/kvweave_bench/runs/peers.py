"""Bench: the engine against what else runs the same weights on a CPU, llama.cpp and transformers.

Each peer is measured in the setting that is its best for a figure: llama.cpp with and without flash
attention, transformers in float32 and bfloat16. Prompts, threads and greedy choice are the same.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from kvweave.config import CacheConfig, EngineConfig
from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray
from kvweave.models import packaged
from kvweave_bench import reference
from kvweave_bench.base import Bench
from kvweave_bench.driver import Driver, per_token
from kvweave_bench.llama_cpp import check_installed
from kvweave_bench.measure import Against, alternate, row
from kvweave_bench.options import chosen_cells
from kvweave_bench.reference import Reference
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting

_OURS, _LLAMA, _TRANSFORMERS = "kvweave", "llama.cpp", "transformers"
_LONG, _SHORT = (4096, 512), (512, 128)
"""Contexts of a run, and of a quick one."""
_APPENDED, _DECODED = 15, 16
_TOGETHER, _TOGETHER_PROMPT = 8, 128
_INTRODUCTION = 64
_REST = 0.3
"""Seconds between two runs."""

_Theirs = Callable[[Reference, int], float]
_Peers = Mapping[str, Mapping[str, Reference]]


def measure(setting: Setting) -> list[Row]:
    """Times of ours and theirs in turns; the memory of each in a process of its own."""
    long, short = _SHORT if setting.quick else _LONG
    wanted = chosen_cells("peers", _CELLS, setting.options.cells)
    check_installed()
    rows: list[Row] = []
    with _peers(setting, max(2 * long, 2 * _TOGETHER * (_TOGETHER_PROMPT + _DECODED))) as peers:
        race = _Race(setting, peers)
        figures: dict[str, Callable[[], list[Row]]] = {
            "prefill-short": lambda: race.prefill(short),
            "prefill": lambda: race.prefill(long),
            "decode-short": lambda: race.decode("decode_short", _TOGETHER_PROMPT),
            "decode": lambda: race.decode(f"decode_after_{long}", long),
            "append": lambda: race.append_and_repeat(long),
            "together": race.together,
            "moved": lambda: race.moved(long),
        }
        for name, figure in figures.items():
            if name in wanted:
                rows += figure()
    return rows + (_memory(setting) if "memory" in wanted else [])


_CELLS = (
    *("prefill-short", "prefill", "decode-short", "decode"),
    *("append", "together", "moved", "memory"),
)


@contextmanager
def _gguf(setting: Setting) -> Iterator[str]:
    """The file that ours was loaded from."""
    model = setting.options.model
    if model is not None:
        if not model.endswith(".gguf"):
            raise KvweaveError("bench peers needs the same weights as llama.cpp: a GGUF file")
        yield model
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield str(packaged.gguf_file(Path(scratch)))


@contextmanager
def _peers(setting: Setting, context: int) -> Iterator[_Peers]:
    with ExitStack() as stack:
        file = stack.enter_context(_gguf(setting))
        llama = {
            name: stack.enter_context(reference.llama_cpp(file, context, flash_attention=flash))
            for name, flash in (("flash attention", True), ("no flash attention", False))
        }
        types = (torch.float32,) if setting.quick else (torch.float32, torch.bfloat16)
        plain = {
            str(dtype): stack.enter_context(reference.plain_transformers(setting.loaded, dtype))
            for dtype in types
        }
        yield {_LLAMA: llama, _TRANSFORMERS: plain}


class _Race:
    """The figures that compare times."""

    def __init__(self, setting: Setting, peers: _Peers) -> None:
        self._setting, self._peers = setting, peers

    def prefill(self, length: int) -> list[Row]:
        prompts = self._prompts(length)
        driver = self._driver("none", 2 * length)
        return self._run(
            f"prefill_{length}",
            lambda index: driver.serve([prompts[index]])[0].first_token_seconds,
            lambda peer, index: peer.prefill(prompts[index]),
        )

    def decode(self, metric: str, context: int) -> list[Row]:
        prefix, driver = self._prefilled(context)
        return self._run(
            metric,
            lambda _: per_token(driver.serve([prefix], max_tokens=_DECODED + 1)[0]),
            lambda peer, _: float(np.median(peer.decode(_DECODED))),
        )

    def append_and_repeat(self, context: int) -> list[Row]:
        prefix, driver = self._prefilled(context)
        added = self._prompts(_APPENDED)

        def append(index: int) -> float:
            prompt = np.concatenate([prefix, added[index]])
            return driver.serve([prompt])[0].first_token_seconds

        rows = self._run(
            f"append_{_APPENDED}_after_{context}",
            append,
            lambda peer, index: peer.append(added[index]),
        )
        return rows + self._run(
            f"repeat_{context}",
            lambda _: driver.serve([prefix])[0].first_token_seconds,
            lambda peer, _: peer.repeat(prefix),
        )

    def together(self) -> list[Row]:
        """Milliseconds of a step that decodes one token of each of eight answers."""
        prompts = np.stack([self._take(_TOGETHER_PROMPT) for _ in range(_TOGETHER)])
        slots = 2 * _TOGETHER * (_TOGETHER_PROMPT + _DECODED)
        driver = self._driver("none", slots)

        def ours(_: int) -> float:
            driver.serve(list(prompts), max_tokens=_DECODED + 1)
            return float(np.median(driver.step_seconds[-_DECODED:]))

        return self._run(
            f"decode_batch_{_TOGETHER}",
            ours,
            lambda peer, _: float(np.median(peer.decode_together(prompts, _DECODED))),
        )

    def moved(self, length: int) -> list[Row]:
        """A known document behind a new introduction; for peers it is a new prompt."""
        document = self._take(length - _INTRODUCTION)
        driver = self._driver("fuzzy_match", 3 * length)
        driver.serve([document])
        prompts = [
            np.concatenate([self._take(_INTRODUCTION), document])
            for _ in range(self._setting.n + 1)
        ]
        return self._run(
            f"moved_{length}",
            lambda index: driver.serve([prompts[index]])[0].first_token_seconds,
            lambda peer, index: peer.prefill(prompts[index]),
        )

    def _prefilled(self, context: int) -> tuple[IntArray, Driver]:
        prefix, driver = self._take(context), self._driver("radix", 2 * context)
        driver.serve([prefix])
        for some in self._peers.values():
            for peer in some.values():
                peer.prefill(prefix)
        return prefix, driver

    def _run(self, metric: str, ours: Callable[[int], float], theirs: _Theirs) -> list[Row]:
        """Milliseconds; the warm-up decides which setting of a peer takes part."""
        setting = self._setting
        best = {
            name: min(some.values(), key=lambda peer: theirs(peer, -1))
            for name, some in self._peers.items()
        }

        def timed(peer: Reference) -> Callable[[int], float]:
            return _rested(lambda index: theirs(peer, index))

        variants = {_OURS: _rested(ours), **{name: timed(peer) for name, peer in best.items()}}
        with setting.progress(metric, len(variants) * (setting.n + 1)) as advance:
            taken = alternate(variants, setting.n, warm_up=1, progress=advance)
        ms = {name: [1e3 * each for each in figures] for name, figures in taken.items()}
        rows = [row(metric, _OURS, ms[_OURS], "ms", Against(name, ms[name])) for name in best]
        return rows + [row(metric, name, ms[name], "ms") for name in best]

    def _driver(self, backend: str, slots: int) -> Driver:
        cache = CacheConfig(prefix_cache_backend=backend, max_total_tokens=slots)
        config = EngineConfig(model=self._setting.model_config, cache=cache)
        return Driver(self._setting.loaded, config)

    def _take(self, length: int) -> IntArray:
        return self._setting.corpus.take(length)

    def _prompts(self, length: int) -> list[IntArray]:
        return [self._take(length) for _ in range(self._setting.n + 1)]


def _rested(run: Callable[[int], float]) -> Callable[[int], float]:
    """`run` after a pause, in which idle threads of whoever ran before stop spinning."""

    def rested(index: int) -> float:
        time.sleep(_REST)
        return run(index)

    return rested


def _memory(setting: Setting) -> list[Row]:
    """Resident megabytes of processes that have computed one short prompt, libraries included."""
    prompt = setting.corpus.take(_TOGETHER_PROMPT)
    figures = {}
    with _gguf(setting) as file:
        for name, started in (
            (_OURS, reference.kvweave(setting.model_config)),
            (_LLAMA, reference.llama_cpp(file, _LONG[0], flash_attention=True)),
            (_TRANSFORMERS, reference.plain_transformers(setting.loaded, torch.float32)),
        ):
            with started as peer:
                peer.prefill(prompt)
                figures[name] = [peer.memory() / 1e6]
    peers = [name for name in figures if name != _OURS]
    rows = [
        row("memory", _OURS, figures[_OURS], "MB", Against(name, figures[name])) for name in peers
    ]
    return rows + [row("memory", name, figures[name], "MB") for name in peers]


BENCH = Bench(
    name="peers",
    counts="rounds",
    n=5,
    quick_n=1,
    measure=measure,
    takes=("cells",),
)
