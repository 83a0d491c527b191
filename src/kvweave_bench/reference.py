"""The baselines: plain transformers with its own attention and its own cache, and llama.cpp."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvweave.config import CacheConfig, EngineConfig, ModelConfig
from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray
from kvweave.models.cache import no_library_bars
from kvweave.models.load import LoadedModel, load_model
from kvweave_bench.driver import Driver
from kvweave_bench.llama_cpp import LlamaCpp
from kvweave_bench.measure import quiet_collector, seconds


class Reference(Protocol):
    """A model with one context in its cache. Times are seconds, up to the greedy token."""

    def prefill(self, prompt: IntArray) -> float:
        """Forget everything, then compute `prompt` in one pass."""

    def append(self, tokens: IntArray) -> float:
        """Compute `tokens` behind what is cached; they are forgotten again afterwards."""

    def decode(self, n: int) -> list[float]:
        """Decode `n` tokens behind what is cached; they are forgotten again afterwards."""

    def repeat(self, prompt: IntArray) -> float:
        """Compute `prompt` again, which is what is cached."""

    def decode_together(self, prompts: IntArray, n: int) -> list[float]:
        """Compute prompts (rows, length), then decode `n` tokens of each, a step at a time."""

    def memory(self) -> int:
        """Resident bytes of the process."""


class Transformers:
    """A second copy of the model, as transformers loads it, in this process."""

    def __init__(self, path: str, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        with no_library_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self.model = model.eval().requires_grad_(False).to(device)
        self._cache = DynamicCache(config=model.config)

    def prefill(self, prompt: IntArray) -> float:
        self._cache = DynamicCache(config=self.model.config)
        return seconds(lambda: self._next(prompt.tolist()))

    def append(self, tokens: IntArray) -> float:
        taken = seconds(lambda: self._next(tokens.tolist()))
        self._cache.crop(-len(tokens))
        return taken

    def decode(self, n: int) -> list[float]:
        token, taken = 0, []
        with quiet_collector():
            for _ in range(n):
                start = time.perf_counter()
                token = self._next([token])
                taken.append(time.perf_counter() - start)
        self._cache.crop(-n)
        return taken

    def repeat(self, prompt: IntArray) -> float:
        self._cache.crop(-1)
        return seconds(lambda: self._next(prompt[-1:].tolist()))

    def decode_together(self, prompts: IntArray, n: int) -> list[float]:
        self._cache = DynamicCache(config=self.model.config)
        self._step(torch.from_numpy(prompts.astype(np.int64)))
        tokens, taken = torch.zeros(len(prompts), 1, dtype=torch.int64), []
        with quiet_collector():
            for _ in range(n):
                start = time.perf_counter()
                tokens = self._step(tokens)
                taken.append(time.perf_counter() - start)
        return taken

    def _next(self, tokens: list[int]) -> int:
        return int(self._step(torch.tensor([tokens])))

    @torch.inference_mode()
    def _step(self, ids: torch.Tensor) -> torch.Tensor:
        """The greedy next tokens (rows, 1) of ids (rows, length)."""
        output = self.model(
            input_ids=ids.to(self.device), cache=self._cache, use_cache=True, logits_to_keep=1
        )
        tokens: torch.Tensor = output.logits[:, -1].argmax(-1, keepdim=True)
        return tokens.cpu()


class _Kvweave:
    """This engine in a process of its own, to see its memory."""

    def __init__(self, config: ModelConfig) -> None:
        cache = CacheConfig(max_total_tokens=8192)
        self._driver = Driver(load_model(config), EngineConfig(model=config, cache=cache))

    def prefill(self, prompt: IntArray) -> float:
        return self._driver.serve([prompt])[0].first_token_seconds


class _Remote:
    """Asks a `Transformers` in another process, which does the timing."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def prefill(self, prompt: IntArray) -> float:
        return float(self._ask("prefill", prompt))

    def append(self, tokens: IntArray) -> float:
        return float(self._ask("append", tokens))

    def decode(self, n: int) -> list[float]:
        return list(self._ask("decode", n))

    def repeat(self, prompt: IntArray) -> float:
        return float(self._ask("repeat", prompt))

    def decode_together(self, prompts: IntArray, n: int) -> list[float]:
        return list(self._ask("decode_together", prompts, n))

    def memory(self) -> int:
        return int(self._ask("memory"))

    def _ask(self, method: str, *arguments: object) -> Any:
        try:
            self._connection.send((method, arguments))
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise KvweaveError("the process that runs a baseline has died") from error


def plain_transformers(
    loaded: LoadedModel, dtype: torch.dtype | None = None
) -> AbstractContextManager[Reference]:
    """Transformers as anyone gets it: in a process of its own.

    Loading a model for serving changes how this whole process allocates memory, from which
    transformers would profit too (by up to 8 % where it was measured).
    """
    return _started(partial(Transformers, loaded.path, dtype or loaded.dtype, loaded.device))


def llama_cpp(
    file: str, context: int, *, flash_attention: bool
) -> AbstractContextManager[Reference]:
    """llama.cpp with a GGUF file, in a process of its own."""
    threads = torch.get_num_threads()
    return _started(partial(LlamaCpp, file, threads, context, flash_attention=flash_attention))


def kvweave(config: ModelConfig) -> AbstractContextManager[Reference]:
    """This engine in a process of its own. It offers `prefill` and `memory`."""
    return _started(partial(_Kvweave, config))


@contextmanager
def _started(make: Callable[[], object]) -> Iterator[Reference]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    given = (theirs, make, torch.get_num_threads())
    process = context.Process(target=_answer, args=given, daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Remote(ours)
    finally:
        ours.close()  # the other end's recv then ends with EOFError
        process.join(10)
        process.kill()


def _answer(connection: Connection, make: Callable[[], object], threads: int) -> None:
    torch.set_num_threads(threads)
    made = make()
    try:
        while True:
            method, arguments = connection.recv()
            answer = _resident() if method == "memory" else getattr(made, method)(*arguments)
            connection.send(answer)
    except EOFError:
        return


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
