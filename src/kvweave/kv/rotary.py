"""Turning rotary keys from one position to another.

A rotary key at position p is its unrotated self turned by p times its frequencies. So at q it is
the same, turned by q - p more: rotations in a plane add up (RoFormer, arXiv 2104.09864, section 3).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvweave.kv.layout import Rotary


def turn(rotary: Rotary, delta: int) -> npt.NDArray[np.float32]:
    """Factors that turn a key by `delta` positions: (2, turned), turned = 2 * len(inv_freq).

    Element x of a key's rotated part becomes x * factors[0] + partner(x) * factors[1]; the partner
    is the other element of its pair. Angles are worked out in float64: after a million positions at
    the highest frequency, a float32 knows an angle to a sixteenth of a radian only.
    """
    angles = delta * rotary.inv_freq.astype(np.float64)
    cosine, sine = np.cos(angles), np.sin(angles)
    if rotary.interleaved:
        factors = np.stack([np.repeat(cosine, 2), np.stack([-sine, sine], 1).ravel()])
    else:
        factors = np.stack([np.tile(cosine, 2), np.concatenate([-sine, sine])])
    return factors.astype(np.float32)


def relocate(keys: torch.Tensor, rotary: Rotary, delta: int) -> torch.Tensor:
    """`keys` (..., key_dim) of any positions, each `delta` positions further on. A new tensor.

    Computed in float32, rounded once to the keys' own type.
    """
    factors = torch.from_numpy(turn(rotary, delta)).to(keys.device)
    start, stop = rotary.offset, rotary.offset + factors.shape[1]
    moved = keys.clone()
    turned = keys[..., start:stop].float()
    if rotary.interleaved:
        pairs = turned.reshape(*turned.shape[:-1], len(rotary.inv_freq), 2)
        partner = pairs.flip(-1).reshape(turned.shape)
    else:
        partner = turned.roll(factors.shape[1] // 2, -1)
    moved[..., start:stop] = (turned * factors[0] + partner * factors[1]).to(keys.dtype)
    return moved
