"""The compatibility check at start: packed rows must get the logits that each row gets alone.

It finds everything that kvweave's attention lacks (biases added to scores, state that runs from
token to token, a head that ignores which rows are wanted) before the first request.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from kvweave.errors import UnsupportedModelError
from kvweave.kv.layout import LayerLayout
from kvweave.models import hooks
from kvweave.models.decoder import Decoder, find_decoder
from kvweave.models.quantized import bits_of

_LENGTHS = (11, 1, 4)
"""Lengths of the rows, in tokens."""
# Relative difference of logits that rounding explains; in narrow types it may choose other experts.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_HALF = 1e-1
_TOLERANCE_QUANTIZED = 5e-3
"""Rows are rounded to 16 bits, and a difference in the last bit of a float may cross a boundary."""


class Compatibility(NamedTuple):
    """Properties of a model that passed the check."""

    vocab_size: int
    """Logits per token."""
    prunes_tokens: bool
    """Tokens may drop out between its layers without a change for the others."""
    decoder: Decoder | None
    """Computes the same logits faster."""


def check_compatibility(model: PreTrainedModel, layouts: tuple[LayerLayout, ...]) -> Compatibility:
    """Compare the logits of packed rows with those of each row alone.

    It also lets `hooks.token_pruning` reach the model's layers. Raises UnsupportedModelError, as
    the end of a sentence about the model, where the logits differ.
    """
    rows = _Rows(model, layouts)
    with torch.inference_mode():
        expected = rows.alone()
        packed = rows.packed(rows.ends - 1)
        if packed.shape != expected.shape:
            raise UnsupportedModelError("it cannot give the logits of chosen tokens only")
        if not rows.close(packed, expected):
            raise UnsupportedModelError(
                "it answers prompts that are computed together otherwise than each alone, so it "
                "needs something that kvweave's attention does not have (such as biases on scores, "
                "or state that runs from token to token)"
            )
        hooks.prepare(model)
        decoder = find_decoder(model, layouts)
        if decoder is not None and not rows.close(rows.decoded(decoder), packed):
            decoder = None
        return Compatibility(int(packed.shape[-1]), _prunes_tokens(rows, packed[1:]), decoder)


def _prunes_tokens(rows: _Rows, expected: torch.Tensor) -> bool:
    """Whether the logits stay as `expected` when the first row drops out after the first layer."""
    total, gone = sum(_LENGTHS), _LENGTHS[0]
    dense = rows.attention
    dense.layer = None
    at = rows.ends[1:] - 1

    def drop(tensor: torch.Tensor) -> torch.Tensor:
        if dense.layer is None or tensor.dim() < 2 or tensor.shape[:2] != (1, total):
            return tensor
        if dense.rows[0].stop == gone:
            dense.rows = [slice(row.start - gone, row.stop - gone) for row in dense.rows[1:]]
            at.sub_(gone)
        return tensor[:, gone:]

    try:
        with hooks.token_pruning(drop):
            found = rows.packed(at)
    except Exception:  # model code may fail in any way when tensors get shorter between layers
        return False
    return (
        len(dense.rows) < len(_LENGTHS)
        and found.shape == expected.shape
        and rows.close(found, expected)
    )


class _Rows:
    """A few rows of tokens, and the model's logits for them, packed and alone."""

    def __init__(self, model: PreTrainedModel, layouts: tuple[LayerLayout, ...]) -> None:
        self._model = model
        device, vocab = model.device, model.config.get_text_config().vocab_size
        self._ids = torch.arange(1, sum(_LENGTHS) + 1, device=device) * 7919 % vocab
        self._positions = torch.cat([torch.arange(n, device=device) for n in _LENGTHS])
        self.ends = torch.tensor(_LENGTHS, device=device).cumsum(0)
        self.attention = _DensePacked(layouts, [0, *self.ends.tolist()])

    def close(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether rounding explains the difference."""
        tolerance = _TOLERANCE.get(found.dtype, _TOLERANCE_HALF)
        if bits_of(self._model):
            tolerance = max(tolerance, _TOLERANCE_QUANTIZED)
        error = (found - expected).float().norm() / expected.float().norm()
        return bool(error < tolerance)

    def alone(self) -> torch.Tensor:
        """Each row's last logits (rows, vocab), from a forward pass of its own."""
        single = torch.split(self._ids, list(_LENGTHS))
        return torch.cat(
            [self._model(input_ids=row[None], use_cache=False).logits[0, -1:] for row in single]
        )

    def packed(self, at: torch.Tensor) -> torch.Tensor:
        """Logits (len(at), vocab) of the tokens `at`, from one forward pass over all rows."""
        with hooks.implementation(self._model, hooks.SERVING), hooks.attention(self.attention):
            logits: torch.Tensor = self._model(
                input_ids=self._ids[None],
                position_ids=self._positions[None],
                use_cache=False,
                logits_to_keep=at,
            ).logits[0]
        return logits

    def decoded(self, decoder: Decoder) -> torch.Tensor:
        """The rows' last logits, by `decoder`."""
        attention = _DecoderAttention(self._positions, self.attention)
        return decoder.run(self._ids, max(_LENGTHS), self.ends - 1, attention)


@dataclass(frozen=True)
class _DecoderAttention:
    """The same attention for a Decoder."""

    positions: torch.Tensor
    dense: _DensePacked

    def targets(self, layer: int) -> None:
        return None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        fresh: tuple[torch.Tensor, torch.Tensor] | None,
        scale: float,
    ) -> torch.Tensor:
        assert fresh is not None
        module: Any = SimpleNamespace(layer_idx=layer)
        q, k, v = (each.transpose(0, 1)[None] for each in (query, *fresh))
        return self.dense(module, q, k, v, None, scaling=scale)[0][0].contiguous()


class _DensePacked:
    """The engine's attention in its plainest form: all scores, masked per row."""

    def __init__(self, layouts: tuple[LayerLayout, ...], starts: list[int]) -> None:
        self.layouts = layouts
        self.rows = [slice(*pair) for pair in pairwise(starts)]
        self.layer: int | None = None
        """The layer that was computed last; None before the first."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer: int = module.layer_idx  # type: ignore[assignment]
        self.layer = layer
        window = self.layouts[layer].window
        groups = query.shape[1] // key.shape[1]
        outputs = []
        for row in self.rows:
            k, v = (x[0, :, row].repeat_interleave(groups, dim=0) for x in (key, value))
            scores = query[0, :, row] @ k.transpose(1, 2) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            if window is not None:
                hidden |= torch.ones_like(hidden).tril(-window)
            scores = scores.float().masked_fill(hidden, -torch.inf)
            if s_aux is not None:
                sinks = s_aux.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = functional.softmax(scores, dim=-1)[..., : v.shape[1]]
            outputs.append(weights.to(v.dtype) @ v)
        return torch.cat(outputs, dim=1).transpose(0, 1).contiguous()[None], None
