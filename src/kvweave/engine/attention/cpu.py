"""Attention on CPUs: a compiled kernel reads the paged pool where it lies."""

from __future__ import annotations

import ctypes
import weakref
from typing import ClassVar

import torch

from kvweave import kernels
from kvweave.engine.attention.base import AttentionBatch, LayerCall
from kvweave.engine.attention.sdpa import GatheredAttention
from kvweave.kv.tensors import KVTensors


class CpuAttention:
    """The `cpu` backend: the kernel; plain torch without one, and for types it does not know.

    `native` False forgoes the kernel; `level` chooses one of its instruction sets.
    """

    name: ClassVar[str] = "cpu"

    def __init__(self, *, native: bool = True, level: int | None = None) -> None:
        self._plain = GatheredAttention()
        self._library = kernels.load() if native else None
        self._out = torch.empty(0)
        self._call = kernels.AttentionCall()
        if self._library is not None:
            self._call.level = self._library.level if level is None else level
            self._workspace = self._library.open_attention()
            weakref.finalize(self, self._library.close_attention, self._workspace)

    def begin(self, batch: AttentionBatch) -> None:
        """See AttentionBackend.begin."""
        for array, dtype in (
            (batch.positions, torch.int64),
            (batch.query_start, torch.int32),
            (batch.pages, torch.int32),
            (batch.page_start, torch.int32),
        ):
            if array.dtype != dtype or not array.is_contiguous():
                raise TypeError(f"a batch's array must be contiguous {dtype}, not {array.dtype}")
        self._batch = batch
        self._planned = False
        call = self._call
        call.rows = batch.rows
        call.page_size = batch.page_size
        call.positions = batch.positions.data_ptr()
        call.query_start = batch.query_start.data_ptr()
        call.pages = batch.pages.data_ptr()
        call.page_start = batch.page_start.data_ptr()
        call.threads = torch.get_num_threads()

    def attend(self, query: torch.Tensor, kv: KVTensors, call: LayerCall) -> torch.Tensor:
        """See AttentionBackend.attend. The result is overwritten by the next call."""
        known = query.dtype in kernels.FLOATS and kv.dtype in kernels.NUMBER_TYPES
        if self._library is None or not known:
            return self._attend_plain(query, kv, call)
        query = query.contiguous()
        keys, values = kv.keys[call.layer], kv.values[call.layer]
        out = self._room(query, values.shape[2])
        native = self._call
        native.query = query.data_ptr()
        native.keys = keys.data_ptr()
        native.values = values.data_ptr()
        if kv.key_scales:
            native.key_scales = kv.key_scales[call.layer].data_ptr()
            native.value_scales = kv.value_scales[call.layer].data_ptr()
        native.sinks = None if call.sinks is None else call.sinks.data_ptr()
        native.out = out.data_ptr()
        native.heads = query.shape[1]
        native.kv_heads = keys.shape[1]
        native.key_dim = keys.shape[2]
        native.value_dim = values.shape[2]
        native.window = call.window or 0
        native.scale = call.scale
        native.softcap = call.softcap or 0
        native.query_type = kernels.NUMBER_TYPES[query.dtype]
        native.type = kernels.NUMBER_TYPES[kv.dtype]
        if self._library.attend(ctypes.byref(native), self._workspace):
            raise MemoryError("no memory for attention's intermediate results")
        return out

    def _attend_plain(self, query: torch.Tensor, kv: KVTensors, call: LayerCall) -> torch.Tensor:
        if not self._planned:
            self._plain.begin(self._batch)
            self._planned = True
        return self._plain.attend(query, kv, call)

    def _room(self, query: torch.Tensor, value_dim: int) -> torch.Tensor:
        """An output of the right shape in memory that all calls share."""
        shape = (query.shape[0], query.shape[1], value_dim)
        count = shape[0] * shape[1] * shape[2]
        if self._out.dtype != query.dtype or self._out.numel() < count:
            self._out = torch.empty(count, dtype=query.dtype)
        return self._out[:count].view(shape)
