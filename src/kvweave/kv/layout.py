"""The shape of each layer's KV, and the rotation that its keys carry.

Filled in by `models.inspect` from a loaded model; read by the pool of tensors, by attention and by
relocation. Numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """The rotation that a layer applies to keys: pair i turns by `position * inv_freq[i]` radians.

    The `2 * len(inv_freq)` rotated dimensions of each head begin at `offset` (partial rotary: fewer
    than the head has; MLA: behind the part without position). `interleaved`: pairs are (2i, 2i + 1)
    as in GPT-J; else (i, i + len) as in NeoX and Llama. A constant scale of keys (YaRN) does not
    matter: rotations commute with it. Source: RoFormer, arXiv 2104.09864, equation 34.
    """

    inv_freq: npt.NDArray[np.float64]
    interleaved: bool = False
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LayerLayout:
    """One layer's KV: keys (slots, num_kv_heads, key_dim), values (slots, num_kv_heads, value_dim).

    `window`: a query at position p sees positions above p - window only (None: all earlier ones).
    `rotary` None means that keys cannot be moved to another position; `fixed_because` says why, as
    the end of a sentence that begins "its keys cannot be moved: ".
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    rotary: Rotary | None = None
    fixed_because: str | None = None

    @property
    def values_per_slot(self) -> int:
        """Numbers stored per token in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)
