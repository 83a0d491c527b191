"""llama.cpp as a baseline: its C interface, by way of the package llama-cpp-python."""

from __future__ import annotations

import ctypes
import importlib.util
import time
from typing import Any

import numpy as np

from kvweave.errors import KvweaveError, extra
from kvweave.kv.pool import IntArray
from kvweave_bench.measure import quiet_collector, seconds

_BATCH = 2048
"""Tokens per call, the largest prefill step of ours; llama.cpp cuts them as it likes."""
_SEQUENCES = 8


def check_installed() -> None:
    """Raise KvweaveError without the package."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise KvweaveError(f"llama.cpp is compared with: {extra('peers')} first")


class LlamaCpp:
    """A GGUF model with one context per sequence. See `reference.Reference` for the methods."""

    def __init__(self, path: str, threads: int, context: int, *, flash_attention: bool) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, _BATCH, 512
        settings.n_seq_max, settings.kv_unified = _SEQUENCES, True
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn_type = int(flash_attention)
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._length = 0

    def prefill(self, prompt: IntArray) -> float:
        self._api.llama_memory_clear(self._memory, True)
        self._length = 0
        taken = seconds(lambda: self._next(prompt, 0))
        self._length = len(prompt)
        return taken

    def append(self, tokens: IntArray) -> float:
        taken = seconds(lambda: self._next(tokens, self._length))
        self._forget(self._length)
        return taken

    def repeat(self, prompt: IntArray) -> float:
        """All but the last token are cached: the last is computed again, for its logits."""
        self._forget(len(prompt) - 1)
        return seconds(lambda: self._next(prompt[-1:], len(prompt) - 1))

    def decode(self, n: int) -> list[float]:
        token, taken = 0, []
        with quiet_collector():
            for step in range(n):
                start = time.perf_counter()
                token = self._next([token], self._length + step)
                taken.append(time.perf_counter() - start)
        self._forget(self._length)
        return taken

    def decode_together(self, prompts: IntArray, n: int) -> list[float]:
        self._api.llama_memory_clear(self._memory, True)
        rows, length = prompts.shape
        for row in range(rows):
            self._next(prompts[row], 0, row)
        tokens, taken = [0] * rows, []
        with quiet_collector():
            for step in range(n):
                start = time.perf_counter()
                for row, token in enumerate(tokens):
                    self._put(row, token, length + step, row, True)
                self._run(rows)
                tokens = [self._greedy(row) for row in range(rows)]
                taken.append(time.perf_counter() - start)
        return taken

    def _next(self, tokens: Any, position: int, sequence: int = 0) -> int:
        for first in range(0, len(tokens), _BATCH):
            some = tokens[first : first + _BATCH]
            last = len(tokens) - first - 1
            for at, token in enumerate(some):
                self._put(at, int(token), position + first + at, sequence, at == last)
            self._run(len(some))
        return self._greedy(-1)

    def _put(self, at: int, token: int, position: int, sequence: int, wanted: bool) -> None:
        batch = self._batch
        batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
        batch.seq_id[at][0], batch.logits[at] = sequence, wanted

    def _run(self, count: int) -> None:
        self._batch.n_tokens = count
        if self._api.llama_decode(self._context, self._batch):
            raise KvweaveError("llama.cpp could not compute a batch")

    def _greedy(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())

    def _forget(self, begin: int) -> None:
        self._api.llama_memory_seq_rm(self._memory, 0, begin, -1)
