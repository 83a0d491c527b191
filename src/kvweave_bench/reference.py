"""The baseline: plain transformers with its own attention and its own dynamic cache."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray
from kvweave.models.cache import no_library_bars
from kvweave.models.load import LoadedModel
from kvweave_bench.measure import quiet_collector, seconds


class Reference(Protocol):
    """A model with one context in its cache. Times are seconds, up to the greedy token."""

    def prefill(self, prompt: IntArray) -> float:
        """Forget everything, then compute `prompt` in one pass."""

    def append(self, tokens: IntArray) -> float:
        """Compute `tokens` behind what is cached; they are forgotten again afterwards."""

    def decode(self, n: int) -> list[float]:
        """Decode `n` tokens behind what is cached; they are forgotten again afterwards."""


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

    @torch.inference_mode()
    def _next(self, tokens: list[int]) -> int:
        ids = torch.tensor([tokens], device=self.device)
        output = self.model(input_ids=ids, cache=self._cache, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())


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

    def _ask(self, method: str, argument: object) -> Any:
        try:
            self._connection.send((method, argument))
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise KvweaveError("the process that runs plain transformers has died") from error


@contextmanager
def plain_transformers(loaded: LoadedModel) -> Iterator[Reference]:
    """Transformers as anyone gets it: in a process of its own.

    Loading a model for serving changes how this whole process allocates memory, from which
    transformers would profit too (by up to 8 % where it was measured).
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    threads = torch.get_num_threads()
    given = (theirs, loaded.path, loaded.dtype, loaded.device, threads)
    process = context.Process(target=_answer, args=given, daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Remote(ours)
    finally:
        ours.close()  # the other end's recv then ends with EOFError
        process.join(10)
        process.kill()


def _answer(
    connection: Connection, path: str, dtype: torch.dtype, device: torch.device, threads: int
) -> None:
    torch.set_num_threads(threads)
    model = Transformers(path, dtype, device)
    try:
        while True:
            method, argument = connection.recv()
            connection.send(getattr(model, method)(argument))
    except EOFError:
        return
