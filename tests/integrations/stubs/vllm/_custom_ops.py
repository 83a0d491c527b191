"""The one kernel that SGLang takes from vLLM where it has none of its own, written in torch."""

from __future__ import annotations

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Turn query and key (tokens, heads * head_size) by their positions, in place."""
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

    rows = cos_sin_cache.index_select(0, positions.flatten())
    cosine, sine = rows.chunk(2, dim=-1)
    for states in (query, key):
        if states is not None:
            heads = states.view(len(rows), -1, head_size)
            turned = heads[..., : rows.shape[-1]]
            turned.copy_(apply_rotary_emb(turned, cosine, sine, is_neox))
