"""Attention on CPUs: a compiled kernel reads the paged pool in place."""

from __future__ import annotations

import ctypes
import weakref
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from kvweave import kernels
from kvweave.engine.attention.base import AttentionBatch, LayerCall
from kvweave.engine.attention.sdpa import GatheredAttention
from kvweave.kv.layout import Rotary
from kvweave.kv.relocation import turn
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
        self._turns: dict[tuple[bytes, bool], npt.NDArray[np.float32]] = {}
        self._deltas: tuple[int, ...] = ()
        """By kind of rotation, for segments of these deltas: (S, 2, turned)."""
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
        shared = batch.shared
        call.segment_start = None if shared is None else shared.row_start.data_ptr()
        if shared is not None:
            call.segments = shared.runs.data_ptr()
            call.shared_pages = shared.pages.data_ptr()
            if shared.deltas != self._deltas:  # else these rows have gone on
                self._deltas = shared.deltas
                self._turns.clear()
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
        if self._batch.shared is not None:
            self._turn(native, kv.layouts[call.layer].rotary, self._batch.shared.deltas)
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

    def _turn(
        self, native: kernels.AttentionCall, rotary: Rotary | None, deltas: tuple[int, ...]
    ) -> None:
        """Note by how much queries turn for each segment: as its keys would, the other way."""
        assert rotary is not None  # else nothing is shared
        kind = (rotary.inv_freq.tobytes(), rotary.interleaved)
        if kind not in self._turns:  # layers mostly share their frequencies
            self._turns[kind] = np.stack([turn(rotary, -delta) for delta in deltas])
        native.turns = self._turns[kind].ctypes.data
        native.offset = rotary.offset
        native.turned = 2 * len(rotary.inv_freq)
        native.interleaved = rotary.interleaved

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
