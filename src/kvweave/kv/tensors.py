"""The tensors of keys and values: two per layer, addressed by slot, written in place.

As int8 the values of one token and head share a scale, and every 32 numbers of its key: number =
integer * scale, with scale = largest magnitude / 127. One scale for a whole key would double what
int8 costs an answer, since a few dimensions of keys are much larger than the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvweave import kernels
from kvweave.errors import IntegrityError
from kvweave.kv.layout import LayerLayout
from kvweave.kv.pool import IntArray

_SCALE = torch.float32
_TINY = 1e-35
"""Numbers that are all smaller than this are kept as zeros: 127 / them would be infinite."""


def quantize(numbers: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 (..., dim) and float32 scales (..., groups) of numbers (..., dim), half to even.

    Every `group` numbers share a scale; the last of them may be fewer. A number that is infinite
    or not a number makes its scale so, and spoils its whole group.
    """
    exact = numbers.float()
    parts = exact.abs().split(group, -1)
    largest = torch.stack([part.amax(-1) for part in parts], -1)
    factors = torch.where(largest > _TINY, 127 / largest, torch.zeros_like(largest))
    whole = (exact * _per_number(factors, group, exact.shape[-1])).round_()
    return whole.to(torch.int8), largest / 127


def _key_groups(layout: LayerLayout) -> int:
    return -(-layout.key_dim // kernels.KEY_GROUP)


def _group(pool: torch.Tensor, scales: torch.Tensor) -> int:
    """Numbers that share a scale."""
    return pool.shape[2] if scales.shape[2] == 1 else kernels.KEY_GROUP


def _per_number(scales: torch.Tensor, group: int, dim: int) -> torch.Tensor:
    """Scales (..., groups) as (..., dim)."""
    return scales.repeat_interleave(group, -1)[..., :dim]


class KVTensors:
    """Every layer's keys (slots, num_kv_heads, key_dim) and values (.., value_dim).

    With dtype int8 `key_scales` and `value_scales` hold each layer's scales, float32 (slots,
    num_kv_heads, groups); else they are empty. `native` False forgoes the
    compiled kernel; `level` chooses one of its instruction sets.
    """

    def __init__(
        self,
        layouts: Sequence[LayerLayout],
        num_pages: int,
        page_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        native: bool = True,
        level: int | None = None,
    ) -> None:
        self.layouts = tuple(layouts)
        self.page_size = page_size
        self.num_slots = num_pages * page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self._library = kernels.load() if native and self.device.type == "cpu" else None
        self._level = level

        def room(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            # Empty on purpose: untouched pages of memory cost nothing until they are used.
            return torch.empty(self.num_slots, *shape, dtype=dtype, device=self.device)

        self.keys = [room(at.num_kv_heads, at.key_dim) for at in self.layouts]
        self.values = [room(at.num_kv_heads, at.value_dim) for at in self.layouts]
        scaled = self.layouts if dtype == torch.int8 else ()
        self.key_scales = [room(at.num_kv_heads, _key_groups(at), dtype=_SCALE) for at in scaled]
        self.value_scales = [room(at.num_kv_heads, 1, dtype=_SCALE) for at in scaled]

    @staticmethod
    def bytes_per_slot(layouts: Sequence[LayerLayout], dtype: torch.dtype) -> int:
        """Memory that one token's KV takes over all layers, scales included."""
        numbers = sum(at.values_per_slot for at in layouts) * dtype.itemsize
        scaled = layouts if dtype == torch.int8 else ()
        scales = sum(at.num_kv_heads * (_key_groups(at) + 1) for at in scaled)
        return numbers + scales * _SCALE.itemsize

    @property
    def page_bytes(self) -> int:
        """Length of one page in `copy_out` and `copy_in`."""
        return self.page_size * self.bytes_per_slot(self.layouts, self.dtype)

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store T tokens' KV: key (T, num_kv_heads, key_dim), value alike, slots int64 (T).

        They are rounded to the pool's type.
        """
        self.write_keys(layer, slots, key)
        self._write(self.values[layer], self.value_scales, layer, slots, value)

    def write_keys(self, layer: int, slots: torch.Tensor, key: torch.Tensor) -> None:
        """Store keys only, as `write`."""
        self._write(self.keys[layer], self.key_scales, layer, slots, key)

    def _write(
        self,
        pool: torch.Tensor,
        scales: list[torch.Tensor],
        layer: int,
        slots: torch.Tensor,
        numbers: torch.Tensor,
    ) -> None:
        if not scales:
            pool.index_copy_(0, slots, numbers.to(pool.dtype))
        elif self._library is not None and numbers.dtype in kernels.FLOATS:
            self._quantize(self._library, pool, scales[layer], slots, numbers.contiguous())
        else:
            integers, scale = quantize(numbers, _group(pool, scales[layer]))
            pool.index_copy_(0, slots, integers)
            scales[layer].index_copy_(0, slots, scale)

    def _quantize(
        self,
        library: kernels.Library,
        pool: torch.Tensor,
        scales: torch.Tensor,
        slots: torch.Tensor,
        numbers: torch.Tensor,
    ) -> None:
        """`quantize` into slots of a pool."""
        call = kernels.QuantizeCall(
            tokens=len(slots),
            heads=pool.shape[1],
            dim=pool.shape[2],
            group=_group(pool, scales),
            slots=slots.data_ptr(),
            numbers=numbers.data_ptr(),
            pool=pool.data_ptr(),
            scales=scales.data_ptr(),
            type=kernels.NUMBER_TYPES[numbers.dtype],
            level=library.level if self._level is None else self._level,
        )
        library.quantize(ctypes.byref(call))

    def unturned(self, layer: int) -> tuple[torch.Tensor, ...]:
        """What of a layer's KV does not depend on its position, by slot."""
        return (self.values[layer], *self.value_scales[layer : layer + 1])

    def read_keys(
        self, layer: int, slots: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Keys of `slots` (any shape) as (*slots.shape, num_kv_heads, key_dim).

        Of type `dtype`; without one the pool's, or float32 where that is int8.
        """
        return self._read(self.keys[layer], self.key_scales, layer, slots, dtype)

    def read_values(
        self, layer: int, slots: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Values of `slots`, as `read_keys`."""
        return self._read(self.values[layer], self.value_scales, layer, slots, dtype)

    @staticmethod
    def _read(
        pool: torch.Tensor,
        scales: list[torch.Tensor],
        layer: int,
        slots: torch.Tensor,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        if scales:
            factors = _per_number(scales[layer][slots], _group(pool, scales[layer]), pool.shape[2])
            return (pool[slots] * factors).to(dtype or _SCALE)
        return pool[slots].to(dtype or pool.dtype)

    def copy_out(
        self, pages: IntArray, out: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        """The bytes of `pages`, (len(pages), page_bytes): all layers' KV, scales included.

        They are written to `out`, if given: of that shape, with contiguous rows.
        """
        data = np.empty((len(pages), self.page_bytes), np.uint8) if out is None else out
        if self._library is not None:
            self._copy_pages(self._library, pages, data, into_pool=False)
            return data
        for part, column in self._by_page(data):
            column[:] = part[pages] if isinstance(part, np.ndarray) else _on_cpu(part, pages)
        return data

    def copy_in(self, pages: IntArray, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite `pages` by what `copy_out` gave, of a pool with the same layouts and type.

        Raises IntegrityError, before anything is written, if the shape does not fit.
        """
        if data.dtype != np.uint8 or data.shape != (len(pages), self.page_bytes):
            raise IntegrityError(
                f"{len(pages)} pages are {self.page_bytes} bytes each, not {data.dtype} "
                f"{data.shape}"
            )
        if self._library is not None:
            self._copy_pages(self._library, pages, data, into_pool=True)
            return
        for part, column in self._by_page(data):
            if isinstance(part, np.ndarray):
                part[pages] = column
            else:
                part[torch.from_numpy(pages).long()] = torch.from_numpy(column.copy()).to(
                    self.device
                )

    def _copy_pages(
        self,
        library: kernels.Library,
        pages: IntArray,
        rows: npt.NDArray[np.uint8],
        *,
        into_pool: bool,
    ) -> None:
        """All pages and tensors in one call, during which other threads run Python."""
        pages = np.ascontiguousarray(pages, np.int32)
        if len(pages) and not 0 <= pages.min() <= pages.max() < self.num_slots // self.page_size:
            raise IndexError(f"pages {pages.min()} to {pages.max()} are not all in the pool")
        parts = self._parts()
        memory = np.array([part.data_ptr() for part in parts], np.uintp)
        lengths = [part.element_size() * part[0].numel() * self.page_size for part in parts]
        bytes_of = np.array(lengths, np.int64)
        call = kernels.PageCopy(
            tensors=len(parts),
            pages=len(pages),
            tensor=memory.ctypes.data,
            bytes=bytes_of.ctypes.data,
            page=pages.ctypes.data,
            rows=rows.ctypes.data,
            stride=rows.strides[0],
            into_pool=into_pool,
        )
        library.copy_pages(ctypes.byref(call))

    def _parts(self) -> tuple[torch.Tensor, ...]:
        return (*self.keys, *self.values, *self.key_scales, *self.value_scales)

    def _by_page(
        self, data: npt.NDArray[np.uint8]
    ) -> Iterator[tuple[npt.NDArray[Any] | torch.Tensor, npt.NDArray[Any]]]:
        """Every tensor as a row of bytes per page, and where these are in the rows of `data`.

        On CPUs a row is one element of numpy's type of raw bytes, which is copied as a whole:
        many times faster than byte by byte.
        """
        start = 0
        for tensor in self._parts():
            part = tensor.view(self.num_slots // self.page_size, -1).view(torch.uint8)
            length = part.shape[1]
            column = data[:, start : start + length]
            start += length
            if length and self.device.type == "cpu":
                raw = np.dtype((np.void, length))
                yield part.numpy().view(raw)[:, 0], column.view(raw)[:, 0]
            elif length:
                yield part, column


def _on_cpu(part: torch.Tensor, pages: IntArray) -> npt.NDArray[np.uint8]:
    rows: npt.NDArray[np.uint8] = part[torch.from_numpy(pages).long()].cpu().numpy()
    return rows
