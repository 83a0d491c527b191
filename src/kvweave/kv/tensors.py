"""The tensors of keys and values: two per layer, addressed by slot, written in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvweave.kv.layout import LayerLayout


class KVTensors:
    """Every layer's keys (slots, num_kv_heads, key_dim) and values (.., value_dim)."""

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

        def room(heads: int, dim: int) -> torch.Tensor:
            # Empty on purpose: untouched pages of memory cost nothing until they are used.
            return torch.empty(self.num_slots, heads, dim, dtype=dtype, device=self.device)

        self.keys = [room(at.num_kv_heads, at.key_dim) for at in self.layouts]
        self.values = [room(at.num_kv_heads, at.value_dim) for at in self.layouts]

    @classmethod
    def over(
        cls,
        layouts: Sequence[LayerLayout],
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> KVTensors:
        """Wraps tensors of the shapes above that belong to another owner, without a copy."""
        view = cls.__new__(cls)
        view.layouts, view.keys, view.values = tuple(layouts), list(keys), list(values)
        view.page_size, view.num_slots = 1, len(keys[0])
        view.dtype, view.device = keys[0].dtype, keys[0].device
        return view

    @staticmethod
    def bytes_per_slot(layouts: Sequence[LayerLayout], dtype: torch.dtype) -> int:
        """Memory that one token's KV takes over all layers."""
        return sum(at.values_per_slot for at in layouts) * dtype.itemsize

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store T tokens' KV: key (T, num_kv_heads, key_dim), value alike, slots int64 (T)."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)
