"""Attention in plain torch: gather each row's context, then `scaled_dot_product_attention`.

Works on every device and for every layout that the engine supports. It copies the context of every
row in every layer, which is what the `cpu` kernel and `flashinfer` avoid.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, TypeAlias

import torch
import torch.nn.functional as functional

from kvweave.engine.attention.base import AttentionBatch, LayerCall
from kvweave.kv.relocation import relocate
from kvweave.kv.tensors import KVTensors

_QUERIES_AT_ONCE = 1024
"""Queries of one row that share a mask: it must not grow with the square of a prompt."""
_PADDED_SLOTS = 1 << 19
"""Most slots that one gather of single-query rows may touch, padding included."""


_Segment: TypeAlias = tuple[int, int, torch.Tensor, int]
"""Of SharedSegments.of."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Tokens [first, last) of the batch, of one row, see `slots`: those of positions 0, 1, ..."""

    first: int
    last: int
    lowest: int
    """Position of the first query; later ones are larger."""
    highest: int
    slots: torch.Tensor
    turned: tuple[tuple[int, int, int], ...]
    """Positions [begin, end) whose keys have to be turned by a delta."""


@dataclass(frozen=True, slots=True)
class _Singles:
    """Rows with one query each: `tokens` int64 (N) of the batch see `slots` int64 (N, longest)."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class GatheredAttention:
    """The `sdpa` backend.

    `together`: rows with one query each are padded and computed in one go, which saves launches;
    by default on every device but a CPU.
    """

    name: ClassVar[str] = "sdpa"

    def __init__(self, *, together: bool | None = None) -> None:
        self._together = together

    def begin(self, batch: AttentionBatch) -> None:
        """Work out, once for all layers, which slots each row reads."""
        self._batch = batch
        starts = batch.query_start.tolist()
        page_starts = batch.page_start.tolist()
        counts = [last - first for first, last in pairwise(starts)]
        self._blocks: list[_Block] = []
        singles: list[int] = []
        together = self._together
        if together is None:
            together = batch.positions.device.type != "cpu"
        for row, count in enumerate(counts):
            shared = [] if batch.shared is None else batch.shared.of(row, batch.page_size)
            if count == 1 and together and not shared:
                singles.append(row)
            elif count:
                table = slice(*page_starts[row : row + 2])
                self._plan_row(starts[row], starts[row + 1], table, shared)
        self._singles = self._plan_singles(singles)

    def attend(self, query: torch.Tensor, kv: KVTensors, call: LayerCall) -> torch.Tensor:
        """See AttentionBackend.attend."""
        out = query.new_empty(query.shape[0], query.shape[1], kv.values[call.layer].shape[2])
        for block in self._blocks:
            self._attend_block(block, query, kv, call, out)
        for some in self._singles:
            self._attend_singles(some, query, kv, call, out)
        return out

    def _plan_row(self, first: int, last: int, table: slice, shared: list[_Segment]) -> None:
        batch = self._batch
        slots = _slots_of(batch.pages[table], batch.page_size)
        for begin, _, places, _ in shared:
            slots = torch.cat([slots[:begin], places.to(slots.device), slots[begin:]])
        turned = tuple((begin, end, delta) for begin, end, _, delta in shared)
        positions = batch.positions[first:last].tolist()
        for at in range(0, last - first, _QUERIES_AT_ONCE):
            some = positions[at : at + _QUERIES_AT_ONCE]
            begin = first + at
            self._blocks.append(
                _Block(begin, begin + len(some), some[0], some[-1], slots[: some[-1] + 1], turned)
            )

    def _plan_singles(self, rows: list[int]) -> list[_Singles]:
        batch = self._batch
        plans = []
        most = max(1, _PADDED_SLOTS // max(1, batch.longest))
        for at in range(0, len(rows), most):
            some = torch.tensor(rows[at : at + most], device=batch.pages.device)
            tokens = batch.query_start[some].long()
            positions = batch.positions[tokens]
            span = torch.arange(batch.longest, device=batch.pages.device)
            # Past a row's own end the gather repeats its last slot; the mask hides it.
            inside = torch.minimum(span, positions[:, None])
            pages = batch.pages[batch.page_start[some].long()[:, None] + inside // batch.page_size]
            slots = pages.long() * batch.page_size + inside % batch.page_size
            plans.append(_Singles(tokens, positions, slots))
        return plans

    def _attend_block(
        self,
        block: _Block,
        query: torch.Tensor,
        kv: KVTensors,
        call: LayerCall,
        out: torch.Tensor,
    ) -> None:
        low = 0 if call.window is None else max(0, block.lowest - call.window + 1)
        slots = block.slots[low:]
        keys = kv.read_keys(call.layer, slots, query.dtype)
        values = kv.read_values(call.layer, slots, query.dtype)
        for begin, end, delta in block.turned:
            some = slice(max(0, begin - low), max(0, end - low))
            rotary = kv.layouts[call.layer].rotary
            assert rotary is not None  # else nothing is shared
            keys[some] = relocate(keys[some], rotary, delta)
        heads = keys.shape[1]
        # (kv heads, heads per kv head, tokens, dim): the group rides along as attention's heads,
        # and one KV head serves all of them without a copy.
        q = query[block.first : block.last]
        q = q.view(len(q), heads, -1, q.shape[2]).permute(1, 2, 0, 3)
        k = keys.permute(1, 0, 2).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        v = values.permute(1, 0, 2).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        mask = None
        if block.last - block.first > 1:
            at = self._batch.positions[block.first : block.last, None]
            mask = _visible(at, torch.arange(low, block.highest + 1, device=at.device), call.window)
        sinks = None if call.sinks is None else call.sinks.view(heads, -1, 1, 1)
        done = _attention(q, k, v, mask, call, sinks)
        out[block.first : block.last] = done.permute(2, 0, 1, 3).flatten(1, 2)

    def _attend_singles(
        self,
        some: _Singles,
        query: torch.Tensor,
        kv: KVTensors,
        call: LayerCall,
        out: torch.Tensor,
    ) -> None:
        # (rows, kv heads, heads per kv head, dim): the group's heads are the "tokens" of attention.
        kv_heads = kv.keys[call.layer].shape[1]
        q = query[some.tokens].view(len(some.tokens), kv_heads, -1, query.shape[2])
        at, slots = some.positions[:, None], some.slots
        span = torch.arange(slots.shape[1], device=query.device)
        if call.window is not None and call.window < len(span):
            span = at - torch.arange(call.window - 1, -1, -1, device=query.device)
            slots = slots.gather(1, span.clamp(min=0))
        mask = ((span >= 0) & (span <= at))[:, None, None]
        k = kv.read_keys(call.layer, slots, query.dtype).transpose(1, 2)
        v = kv.read_values(call.layer, slots, query.dtype).transpose(1, 2)
        sinks = None if call.sinks is None else call.sinks.view(kv_heads, -1, 1)
        out[some.tokens] = _attention(q, k, v, mask, call, sinks).flatten(1, 2)


def _slots_of(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    within = torch.arange(page_size, device=pages.device)
    return (pages.long()[:, None] * page_size + within).flatten()


def _visible(at: torch.Tensor, span: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which positions `span` (K) queries at positions `at` (N, 1) see: bool (N, K)."""
    mask = span <= at
    if window is not None:
        mask &= span > at - window
    return mask


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    call: LayerCall,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(scores) v, (..., tokens, value_dim); with the layer's soft cap and sinks, if any."""
    if call.softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * call.scale
    weights = call.weights(scores, None if mask is None else ~mask, sinks)
    return torch.matmul(weights.to(v.dtype), v)
