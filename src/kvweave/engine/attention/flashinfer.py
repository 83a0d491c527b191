"""Attention by FlashInfer's paged kernels, on CUDA.

FlashInfer takes rows whose queries are the last ones of their context. Positions with gaps become
several such rows that share pages: a run of consecutive positions, ending at p, is the end of a
context of p + 1 tokens.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from kvweave.engine.attention.base import AttentionBatch, LayerCall
from kvweave.engine.attention.sdpa import GatheredAttention
from kvweave.kv.tensors import KVTensors

_WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation advises
_TYPES = (torch.float16, torch.bfloat16)
_DIMS = (64, 128, 256)


class _Kind(NamedTuple):
    """What a plan of FlashInfer's depends on, beside the batch: layers of one kind share it."""

    heads: int
    kv_heads: int
    dim: int
    window: int | None
    softcap: float | None
    scale: float
    dtype: torch.dtype


class FlashInferAttention:
    """The `flashinfer` backend; layers of types and sizes that FlashInfer lacks go to `sdpa`."""

    name: ClassVar[str] = "flashinfer"

    def __init__(self, device: torch.device | str) -> None:
        self._flashinfer: Any = importlib.import_module("flashinfer")
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_Kind, Any] = {}
        self._other = GatheredAttention()

    def begin(self, batch: AttentionBatch) -> None:
        """See AttentionBackend.begin."""
        self._batch = batch
        self._planned: set[_Kind] = set()
        self._other_planned = False
        self._rows = _consecutive_rows(batch)

    def attend(self, query: torch.Tensor, kv: KVTensors, call: LayerCall) -> torch.Tensor:
        """See AttentionBackend.attend."""
        keys, values = kv.keys[call.layer], kv.values[call.layer]
        dim = keys.shape[2]
        if (
            query.dtype not in _TYPES
            or self._batch.shared is not None  # pages have the donor's keys
            or kv.dtype != query.dtype
            or dim not in _DIMS
            or values.shape[2] != dim
        ):
            return self._attend_otherwise(query, kv, call)
        kind = _Kind(
            query.shape[1], keys.shape[1], dim, call.window, call.softcap, call.scale, query.dtype
        )
        if kind not in self._planned:
            self._plan(kind)
        pages = (-1, kv.page_size, *keys.shape[1:])
        pool = (keys.view(pages), values.view(pages))
        if call.sinks is None:
            out: torch.Tensor = self._wrappers[kind].run(query, pool)
            return out
        # A sink only makes the softmax's sum larger; `lse` is the binary logarithm of that sum.
        out, lse = self._wrappers[kind].run(query, pool, return_lse=True)
        share = torch.sigmoid(lse * math.log(2) - call.sinks)
        return (out * share[..., None]).to(query.dtype)

    def _plan(self, kind: _Kind) -> None:
        if kind not in self._wrappers:
            make = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
            self._wrappers[kind] = make(self._workspace, "NHD")
        self._wrappers[kind].plan(
            *self._rows,
            kind.heads,
            kind.kv_heads,
            kind.dim,
            self._batch.page_size,
            causal=True,
            sm_scale=kind.scale,
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.softcap,
            q_data_type=kind.dtype,
            kv_data_type=kind.dtype,
        )
        self._planned.add(kind)

    def _attend_otherwise(
        self, query: torch.Tensor, kv: KVTensors, call: LayerCall
    ) -> torch.Tensor:
        if not self._other_planned:
            self._other.begin(self._batch)
            self._other_planned = True
        return self._other.attend(query, kv, call)


def _consecutive_rows(
    batch: AttentionBatch,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The batch with every run of consecutive positions as a row of its own.

    FlashInfer's qo_indptr (rows + 1), paged_kv_indptr (rows + 1), paged_kv_indices and
    paged_kv_last_page_len (rows), all int32.
    """
    positions = batch.positions.cpu().numpy()
    query_start, page_start = batch.query_start.cpu().numpy(), batch.page_start.cpu().numpy()
    pages = batch.pages.cpu().numpy()
    gaps = np.flatnonzero(np.diff(positions) != 1) + 1
    starts = np.union1d(gaps, query_start[:-1][np.diff(query_start) > 0])
    ends = np.append(starts[1:], len(positions))
    lengths = positions[ends - 1] + 1
    owners = np.searchsorted(query_start, starts, side="right") - 1
    counts = -(-lengths // batch.page_size)
    used = [
        pages[first : first + count]
        for first, count in zip(page_start[owners], counts, strict=True)
    ]
    host = (
        np.append(starts, len(positions)),
        np.append(0, np.cumsum(counts)),
        np.concatenate(used),
        (lengths - 1) % batch.page_size + 1,
    )
    device = batch.pages.device
    first, second, third, fourth = (torch.from_numpy(a.astype(np.int32)).to(device) for a in host)
    return first, second, third, fourth
