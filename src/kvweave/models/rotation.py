"""Which rotation turns a layer's key from one position into another: tried, never assumed.

A pair of dimensions (a, b) that turns with its position is the complex number a + ib times
exp(i * position * frequency). So moving a key by d multiplies each pair by exp(i * d * frequency).
Source: RoFormer, arXiv 2104.09864, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvweave.kv.layout import Rotary

Floats: TypeAlias = npt.NDArray[np.float64]

# What a rotation in the model's own arithmetic may be off, relative to the length of a pair: the
# angle at position 1,000 has an error of 1e-4 in float32; cosines are rounded to 2^-9 in bfloat16.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Pairs below this share of the head's average pair are compared to that share: noise has no angle.
_SMALLEST_PAIR = 1e-2


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """The key of one and the same hidden state at several positions.

    values: (positions, heads, dim). positions: as many. tolerance: what the type's arithmetic
    blurs, relative to the length of a pair.
    """

    values: Floats
    positions: Floats
    tolerance: float

    @classmethod
    def of(cls, key: torch.Tensor, positions: Floats) -> Keys:
        """From a key (heads, positions, dim) in the model's type."""
        values = key.transpose(0, 1).double().cpu().numpy()
        return cls(values, positions, _TOLERANCE[key.dtype])

    @property
    def constant(self) -> bool:
        """The key is the same at every position."""
        return self._error(self.values, self.values[:1]) < self.tolerance

    def error(self, rotary: Rotary) -> float:
        """Largest relative difference between the first key, moved, and the keys found."""
        rotated, rest = _split(self.values, rotary)
        angles = (self.positions - self.positions[0])[:, None] * rotary.inv_freq
        moved = rotated[:1] * np.exp(1j * angles)[:, None]
        return max(self._error(rotated, moved), self._error(rest, rest[:1]))

    @staticmethod
    def _error(found: npt.NDArray[np.complexfloating | np.floating], expected: Floats) -> float:
        if not found.size:
            return 0.0
        length = np.abs(found[:1])
        return float(
            (np.abs(found - expected) / np.maximum(length, _SMALLEST_PAIR * length.mean())).max()
        )


def find_rotation(keys: Keys, tables: Sequence[Floats]) -> Rotary | None:
    """The rotation that explains `keys`, built on one of `tables`; None if there is none.

    Keys without position get a rotation of no pairs. Tried are half-split and interleaved pairs, at
    the head's beginning (partial rotary) and at its end (MLA's part without position is in front).
    """
    if keys.constant:
        return Rotary(np.zeros(0))
    candidates = [(keys.error(rotary), rotary) for rotary in _candidates(keys, tables)]
    error, best = min(candidates, key=lambda pair: pair[0], default=(np.inf, None))
    return best if error < keys.tolerance else None


def _candidates(keys: Keys, tables: Sequence[Floats]) -> Iterator[Rotary]:
    dim = keys.values.shape[2]
    for inv_freq in tables:
        behind = dim - 2 * len(inv_freq)
        for offset in sorted({0, behind} if behind >= 0 else ()):
            for interleaved in (False, True):
                yield Rotary(inv_freq, interleaved=interleaved, offset=offset)


def _split(values: Floats, rotary: Rotary) -> tuple[npt.NDArray[np.complex128], Floats]:
    """Rotated pairs as complex numbers, and the dimensions that no rotation touches."""
    pairs = len(rotary.inv_freq)
    end = rotary.offset + 2 * pairs
    inside = values[..., rotary.offset : end]
    if rotary.interleaved:
        rotated = inside[..., 0::2] + 1j * inside[..., 1::2]
    else:
        rotated = inside[..., :pairs] + 1j * inside[..., pairs:]
    return rotated, np.delete(values, np.s_[rotary.offset : end], axis=-1)


def frequency_tables(model: torch.nn.Module) -> list[Floats]:
    """Every different table of rotary frequencies (radians per position) that the model holds."""
    tables: dict[bytes, Floats] = {}
    for name, buffer in model.named_buffers():
        leaf = name.rpartition(".")[2]
        if leaf.endswith("inv_freq"):
            table = buffer.double().cpu().numpy()
        elif leaf == "embed_positions" and buffer.dim() == 2 and len(buffer) > 1:
            # GPT-J keeps sines and cosines per position; at position 1 the angle is the frequency.
            sines = buffer[1, : buffer.shape[1] // 2]
            table = np.arcsin(sines.double().cpu().numpy())
        else:
            continue
        tables.setdefault(table.tobytes(), table)
    return list(tables.values())
