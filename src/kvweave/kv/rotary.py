"""Rotary keys at new positions: a key at position p turned by q - p is the key at q.

Rotations by the same frequencies compose by adding angles, so one turn by the distance replaces
undoing the old position and applying the new one. Source: RoFormer, arXiv 2104.09864, section 3.2.
"""

from __future__ import annotations

import numpy as np
import torch

from kvweave.kv.layout import Rotary


def turn(rotary: Rotary, delta: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 (pairs), of a move by `delta` positions.

    The angles are taken in float64: at positions of a million, float32 angles are off by tenths.
    """
    angles = float(delta) * rotary.inv_freq
    return (
        torch.from_numpy(np.cos(angles).astype(np.float32)),
        torch.from_numpy(np.sin(angles).astype(np.float32)),
    )


def relocate(keys: torch.Tensor, rotary: Rotary, delta: int) -> torch.Tensor:
    """`keys` (..., key_dim) as they would be `delta` positions further on; same type, a copy.

    Computed in float32 whatever the type. Dimensions that carry no position come back unchanged.
    """
    cos, sin = (part.to(keys.device) for part in turn(rotary, delta))
    moved = keys.clone()
    width = 2 * len(rotary.inv_freq)
    turned = keys[..., rotary.offset : rotary.offset + width].float()
    target = moved[..., rotary.offset : rotary.offset + width]
    if rotary.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        target[..., 0::2] = first * cos - second * sin
        target[..., 1::2] = second * cos + first * sin
    else:
        first, second = turned.chunk(2, dim=-1)
        target[..., : width // 2] = first * cos - second * sin
        target[..., width // 2 :] = second * cos + first * sin
    return moved
