"""Plain transformers, as the arm to beat: its own attention, its own dynamic cache."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvweave.bench.measure import quiet_collector, seconds
from kvweave.kv.pool import IntArray
from kvweave.models.loading import LoadedModel


class Reference:
    """A second copy of the model, as transformers loads it.

    All times are seconds, the choice of the greedy token included.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.device = loaded.device
        model: Any = AutoModelForCausalLM.from_pretrained(loaded.path, dtype=loaded.dtype)
        self.model = model.eval().requires_grad_(False).to(self.device)
        self._cache = DynamicCache(config=model.config)

    def prefill(self, prompt: IntArray) -> float:
        """Forget everything, then compute `prompt` in one pass."""
        self._cache = DynamicCache(config=self.model.config)
        return seconds(lambda: self._next(prompt.tolist()))

    def append(self, tokens: IntArray) -> float:
        """Compute `tokens` behind what is cached; they are forgotten again afterwards."""
        taken = seconds(lambda: self._next(tokens.tolist()))
        self._cache.crop(-len(tokens))
        return taken

    def decode(self, n: int) -> list[float]:
        """Decode `n` tokens behind what is cached; they are forgotten again afterwards."""
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
