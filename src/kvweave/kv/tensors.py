"""The tensors of keys and values: two per layer, addressed by slot, written in place.

As int8 each token's keys and values of one head share a scale: number = integer * scale, with
scale = largest magnitude / 127.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvweave.errors import IntegrityError
from kvweave.kv.layout import LayerLayout
from kvweave.kv.pool import IntArray

_SCALE = torch.float32
_TINY = 1e-35
"""Numbers that are all smaller than this are kept as zeros: 127 / them would be infinite."""


def quantize(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 (..., dim) and float32 scales (...) of numbers (..., dim), rounded half to even.

    A number that is infinite or not a number makes its scale so, and spoils its whole row.
    """
    exact = numbers.float()
    largest = exact.abs().amax(-1)
    factor = torch.where(largest > _TINY, 127 / largest, torch.zeros_like(largest))
    return (exact * factor[..., None]).round_().to(torch.int8), largest / 127


class KVTensors:
    """Every layer's keys (slots, num_kv_heads, key_dim) and values (.., value_dim).

    With dtype int8 `key_scales` and `value_scales` hold each layer's scales, float32 (slots,
    num_kv_heads); else they are empty.
    """

    def __init__(
        self,
        layouts: Sequence[LayerLayout],
        num_pages: int,
        page_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layouts = tuple(layouts)
        self.page_size = page_size
        self.num_slots = num_pages * page_size
        self.dtype = dtype
        self.device = torch.device(device)

        def room(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            # Empty on purpose: untouched pages of memory cost nothing until they are used.
            return torch.empty(self.num_slots, *shape, dtype=dtype, device=self.device)

        self.keys = [room(at.num_kv_heads, at.key_dim) for at in self.layouts]
        self.values = [room(at.num_kv_heads, at.value_dim) for at in self.layouts]
        scaled = self.layouts if dtype == torch.int8 else ()
        self.key_scales = [room(at.num_kv_heads, dtype=_SCALE) for at in scaled]
        self.value_scales = [room(at.num_kv_heads, dtype=_SCALE) for at in scaled]

    @classmethod
    def over(
        cls,
        layouts: Sequence[LayerLayout],
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> KVTensors:
        """Wraps tensors of the shapes above that belong to another owner, without a copy.

        They are of a floating-point type.
        """
        view = cls.__new__(cls)
        view.layouts, view.keys, view.values = tuple(layouts), list(keys), list(values)
        view.key_scales, view.value_scales = [], []
        view.page_size, view.num_slots = 1, len(keys[0])
        view.dtype, view.device = keys[0].dtype, keys[0].device
        return view

    @staticmethod
    def bytes_per_slot(layouts: Sequence[LayerLayout], dtype: torch.dtype) -> int:
        """Memory that one token's KV takes over all layers, scales included."""
        numbers = sum(at.values_per_slot for at in layouts) * dtype.itemsize
        scales = sum(2 * at.num_kv_heads for at in layouts) if dtype == torch.int8 else 0
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
        if self.dtype != torch.int8:
            self.keys[layer].index_copy_(0, slots, key.to(self.dtype))
            self.values[layer].index_copy_(0, slots, value.to(self.dtype))
            return
        places = (
            (self.keys[layer], self.key_scales[layer], key),
            (self.values[layer], self.value_scales[layer], value),
        )
        for pool, scales, numbers in places:
            integers, scale = quantize(numbers)
            pool.index_copy_(0, slots, integers)
            scales.index_copy_(0, slots, scale)

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
            return (pool[slots] * scales[layer][slots][..., None]).to(dtype or _SCALE)
        return pool[slots].to(dtype or pool.dtype)

    def copy_out(
        self, pages: IntArray, out: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        """The bytes of `pages`, (len(pages), page_bytes): all layers' KV, scales included.

        They are written to `out`, if given: of that shape, with contiguous rows.
        """
        data = np.empty((len(pages), self.page_bytes), np.uint8) if out is None else out
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
        for part, column in self._by_page(data):
            if isinstance(part, np.ndarray):
                part[pages] = column
            else:
                part[torch.from_numpy(pages).long()] = torch.from_numpy(column.copy()).to(
                    self.device
                )

    def _by_page(
        self, data: npt.NDArray[np.uint8]
    ) -> Iterator[tuple[npt.NDArray[Any] | torch.Tensor, npt.NDArray[Any]]]:
        """Every tensor as a row of bytes per page, and where these are in the rows of `data`.

        On CPUs a row is one element of numpy's type of raw bytes, which is copied as a whole:
        many times faster than byte by byte.
        """
        start = 0
        for tensor in (*self.keys, *self.values, *self.key_scales, *self.value_scales):
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
