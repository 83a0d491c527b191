"""The interface of attention backends.

A packed batch has no padding: its T tokens belong to R rows (requests), each row's tokens at any
ascending positions. A query at position p of row r attends to positions [0, p] of r (or to the
last `window` of them), whatever their source: the KV of all of them is in the pool by the time of
the call, since each layer's fresh KV is written before its queries run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from kvweave.kv.tensors import KVTensors


@dataclass(slots=True)
class AttentionBatch:
    """Queries and block tables of one forward pass, equal for all layers, on the model's device.

    positions: int64 (T). slots: int64 (T), where each token's own KV goes.
    query_start: int32 (R + 1); row r's tokens are [query_start[r], query_start[r + 1]).
    pages: int32, all rows' block tables, one after another; page_start: int32 (R + 1) into it.
    Position p of row r is in slot
    pages[page_start[r] + p // page_size] * page_size + p % page_size.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    pages: torch.Tensor
    page_start: torch.Tensor
    page_size: int
    rows: int
    tokens: int
    longest: int
    """The largest position in the batch, plus one."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer's attention needs beside its tensors."""

    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """float32 (heads), contiguous: a score per head that joins the softmax without a value."""

    def weights(
        self, scores: torch.Tensor, hidden: torch.Tensor | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Softmax over the last dimension of scaled scores, float32, in plain torch.

        hidden: bool, scores that do not count. sinks: the layer's, of a shape that broadcasts.
        """
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is None:
            return scores.softmax(-1)
        total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sinks)
        return (scores - total).exp()


class AttentionBackend(Protocol):
    """Computes attention over the pool. One per engine; its buffers live as long as it does."""

    name: ClassVar[str]

    def begin(self, batch: AttentionBatch) -> None:
        """Called once per forward pass, before any layer: plan work that all layers share."""

    def attend(self, query: torch.Tensor, kv: KVTensors, call: LayerCall) -> torch.Tensor:
        """query (T, heads, key_dim), contiguous; returns (T, heads, value_dim), same type.

        Heads are grouped over KV heads: query head h reads KV head h // (heads // num_kv_heads).
        The result may be overwritten by the next call.
        """
