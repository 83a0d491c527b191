"""The shape of a loaded model's KV, layer by layer, seen by running it, not by reading its name.

One token alone attends to itself, so its attention output is its value wherever it stands: every
layer then sees the same hidden state at every position, and all that position does to a key is the
layer's own rotation. Running such a token at several positions therefore shows each layer's
rotation, and whether one of the model's own frequency tables explains it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from kvweave.errors import UnsupportedModelError
from kvweave.kv.layout import LayerLayout
from kvweave.models import hook
from kvweave.models.rotation import Keys, find_rotation, frequency_tables


@dataclass(slots=True)
class _Seen:
    """One layer's attention call, in a forward pass over two tokens that see only themselves."""

    key: torch.Tensor
    """(1, kv heads, 2, key_dim)"""
    value_dim: int
    window: int


class _Probe:
    """The attention function of a probing pass: notes each layer's call and returns the values."""

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
        s_aux: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        layer = getattr(module, "layer_idx", None)
        if s_aux is not None:
            raise UnsupportedModelError(
                "its attention has sinks (a learned extra term in the softmax), which kvweave does "
                "not compute"
            )
        if layer is None or layer in self.seen:
            raise UnsupportedModelError(
                "it calls attention more than once per layer (cross attention, or an encoder): "
                "kvweave serves decoders only"
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
            window = hook.UNKNOWN_MASK
        self.seen[layer] = _Seen(key, value.shape[-1], window)
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, dim=1).transpose(1, 2), None


def inspect_layers(model: PreTrainedModel, context_length: int) -> tuple[LayerLayout, ...]:
    """One LayerLayout per layer. The model must be on its device, in its type, in eval mode.

    `context_length` bounds the positions that are tried, and the windows that matter. Raises
    UnsupportedModelError, as the end of a sentence about the model, for what cannot be served.
    """
    far = max(1, min(context_length, 1024) - 2)
    with hook.implementation(model, hook.PROBING):
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
    probe = _Probe()
    with torch.inference_mode(), hook.attention(probe):
        model(
            input_ids=torch.full((1, 2), token, device=model.device),
            position_ids=torch.tensor([[position, position + 1]], device=model.device),
            use_cache=False,
            logits_to_keep=1,
        )
    return probe.seen


def _check_layers(seen: dict[int, _Seen], expected: int) -> None:
    missing = [at for at in range(expected) if at not in seen]
    if missing or len(seen) != expected:
        raise UnsupportedModelError(
            f"{len(missing)} of its {expected} layers do not go through transformers' attention "
            "interface (linear attention, state space, convolution, code of its own), so that "
            "kvweave cannot keep their state"
        )
    for at, layer in seen.items():
        if layer.window == hook.UNKNOWN_MASK:
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
