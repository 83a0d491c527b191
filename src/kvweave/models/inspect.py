"""The layout of each layer's KV, found by running a loaded model.

One token alone attends to itself, so its attention output is its value wherever it stands: every
layer then sees the same hidden state at every position, and all that position does to a key is the
layer's own rotation. Running such a token at several positions therefore shows each layer's
rotation, and whether one of the model's own frequency tables explains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kvweave.errors import UnsupportedModelError
from kvweave.kv.layout import LayerLayout, Rotary
from kvweave.models import hooks

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
    # Some models (nanochat) turn the other way round.
    for inv_freq in (*tables, *(-table for table in tables)):
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


@dataclass(slots=True)
class _Seen:
    """One layer's attention call, in a forward pass over two tokens that see only themselves."""

    key: torch.Tensor
    """(1, kv heads, 2, key_dim)"""
    value_dim: int
    window: int


class _LayerRecorder:
    """An attention function that records each layer's call and returns the values."""

    def __init__(self) -> None:
        self.seen: dict[int, _Seen] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sliding_window: int | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer in self.seen:
            raise UnsupportedModelError(
                "it calls attention more than once per layer (cross attention, differential "
                "attention, layers that run again), and kvweave keeps one KV per layer"
            )
        if any(key.data_ptr() == other.key.data_ptr() for other in self.seen.values()):
            raise UnsupportedModelError(
                f"layer {layer} reuses another layer's KV, and kvweave keeps KV per layer"
            )
        if mask is None:
            window = sliding_window or 0
        elif mask.dtype == torch.long:
            window = int(mask.flatten()[0])
        else:  # something was added to it, or it was rounded
            window = hooks.UNKNOWN_MASK
        self.seen[layer] = _Seen(key, value.shape[-1], window)
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous(), None


def inspect_layers(model: PreTrainedModel, context_length: int) -> tuple[LayerLayout, ...]:
    """One LayerLayout per layer. The model must be on its device, in its type, in eval mode.

    `context_length` bounds the positions that are tried, and the windows that matter. Raises
    UnsupportedModelError, as the end of a sentence about the model, for what cannot be served.
    """
    if model._is_stateful:
        raise UnsupportedModelError(f"all or some of its layers {NO_INTERFACE}")
    far = max(1, min(context_length, 1024) - 2)
    with hooks.implementation(model, hooks.INSPECTION):
        near_pass, far_pass = (_run(model, at) for at in (0, far))
    _check_layers(near_pass, model.config.get_text_config().num_hidden_layers)
    positions = np.array([0, 1, far, far + 1], np.float64)
    tables = frequency_tables(model)
    keys = [
        Keys.of(torch.cat([near_pass[at].key[0], far_pass[at].key[0]], dim=1), positions)
        for at in range(len(near_pass))
    ]
    rotations = [find_rotation(at, tables) for at in keys]
    if not any(rotary is not None and len(rotary.inv_freq) for rotary in rotations):
        rotations = [None] * len(keys)
    return tuple(
        LayerLayout(
            num_kv_heads=near_pass[at].key.shape[1],
            key_dim=near_pass[at].key.shape[3],
            value_dim=near_pass[at].value_dim,
            window=window if 0 < (window := near_pass[at].window) < context_length else None,
            rotary=rotary,
            fixed_because=None if rotary is not None else _why_fixed(keys[at]),
        )
        for at, rotary in enumerate(rotations)
    )


def _run(model: PreTrainedModel, position: int) -> dict[int, _Seen]:
    """Each layer's call for one token at `position` and the same token at the next."""
    token = model.config.get_text_config().vocab_size // 2
    recorder = _LayerRecorder()
    with torch.inference_mode(), hooks.attention(recorder):
        model(
            input_ids=torch.full((1, 2), token, device=model.device),
            position_ids=torch.tensor([[position, position + 1]], device=model.device),
            use_cache=False,
            logits_to_keep=1,
        )
    return recorder.seen


NO_INTERFACE = (
    "do not go through transformers' attention interface (linear attention, state space, "
    "convolution, code of its own), so kvweave cannot keep their state; no --prefix-cache-backend "
    "changes that"
)
"""The end of a sentence about the layers of a model that cannot be served."""


def _check_layers(seen: dict[int, _Seen], expected: int) -> None:
    missing = [at for at in range(expected) if at not in seen]
    if missing or len(seen) != expected:
        some = "its" if len(missing) == expected else f"{len(missing)} of its {expected}"
        raise UnsupportedModelError(f"{some} layers {NO_INTERFACE}")
    for at, layer in seen.items():
        if layer.window == hooks.UNKNOWN_MASK:
            raise UnsupportedModelError(
                f"in its layer {at}, tokens attend to something else than all earlier ones or the "
                "last few (chunks, or later tokens)"
            )


def _why_fixed(keys: Keys) -> str:
    if keys.constant:
        return "they carry no position"
    return (
        "position enters them otherwise than by a rotation (it is learned, or added to the tokens)"
    )
