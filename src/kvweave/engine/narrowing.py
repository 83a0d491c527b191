"""A forward pass from which tokens drop out between layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kvweave.engine.attention.base import AttentionBatch
from kvweave.engine.screening import Screener
from kvweave.kv.tensors import KVTensors


class Narrowing:
    """Follows a screener's choice: whatever holds one row per token holds fewer of them.

    attention, logits_at: of the pass as it begins, over the tokens that the screener keeps then.
    `logits_at` is changed in place, since the model has been given it; `begin` is told of every
    new attention batch.
    """

    def __init__(
        self,
        screener: Screener,
        attention: AttentionBatch,
        logits_at: torch.Tensor,
        begin: Callable[[AttentionBatch], None],
    ) -> None:
        self._screener = screener
        self._full = attention
        self._begin = begin
        self._logits_at = logits_at
        self._wanted = logits_at.clone()
        self._first = self._kept = screener.kept
        self._before = len(self._kept)
        self._due = False
        self._from_full = self._from_last = torch.empty(0, dtype=torch.int64)
        self._narrowed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Results by the identity of what was given: every layer is given the same positions."""

    def observe(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, kv: KVTensors
    ) -> None:
        """See Screener.observe. What it decides holds from the next layer on."""
        self._due = self._screener.observe(layer, key, value, slots, kv) or self._due

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """An argument of a decoder layer: (1, tokens, ...) if it holds something per token."""
        if self._due:
            self._narrow()
        now = len(self._kept)
        if tensor.dim() < 2 or len(self._first) == now or tensor.shape[0] != 1:
            return tensor
        if tensor.shape[1] == self._full.tokens:
            known = self._narrowed.get(id(tensor))
            if known is None:
                known = (tensor, tensor.index_select(1, self._from_full))
                self._narrowed[id(tensor)] = known
            return known[1]
        if tensor.shape[1] == self._before and self._before != now:
            return tensor.index_select(1, self._from_last)
        return tensor

    def _narrow(self) -> None:
        device = self._full.positions.device
        last, kept = self._kept, self._screener.kept
        from_full = torch.searchsorted(self._first, kept)
        self._from_full = from_full.to(device)
        self._from_last = torch.searchsorted(last, kept).to(device)
        self._before, self._kept, self._due = len(last), kept, False
        self._narrowed.clear()
        self._logits_at.copy_(torch.searchsorted(self._from_full, self._wanted))
        full = self._full
        self._begin(
            replace(
                full,
                positions=full.positions[self._from_full],
                slots=full.slots[self._from_full],
                query_start=torch.searchsorted(
                    self._from_full, full.query_start.long(), out_int32=True
                ),
                tokens=len(kept),
            )
        )
