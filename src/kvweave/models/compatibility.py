"""A short trial at start: does the model answer packed rows as transformers answers each alone?

Whatever kvweave's attention does not know (biases added to scores, state that runs from token to
token, a head that ignores which rows are wanted) shows up here, before the first request.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from kvweave.errors import UnsupportedModelError
from kvweave.kv.layout import LayerLayout
from kvweave.models import hooks

_ROWS = (11, 1, 4)
"""Lengths of the rows that are tried together."""
# Relative difference of logits that rounding explains; in narrow types it may choose other experts.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_HALF = 1e-1


def check_compatibility(model: PreTrainedModel, layouts: tuple[LayerLayout, ...]) -> int:
    """Compare packed rows with single ones; the number of logits per token.

    Raises UnsupportedModelError, as the end of a sentence about the model, where they differ.
    """
    ids, positions, ends = _packed_rows(model)
    rows = torch.split(ids, list(_ROWS))
    with torch.inference_mode():
        alone = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])
        dense = _DensePacked(layouts, [0, *ends.tolist()])
        with hooks.implementation(model, hooks.SERVING), hooks.attention(dense):
            packed = model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=ends - 1,
            ).logits[0]
    expected = alone[ends - 1]
    if packed.shape != expected.shape:
        raise UnsupportedModelError("it cannot give the logits of chosen tokens only")
    error = (packed - expected).float().norm() / expected.float().norm()
    if not error < _TOLERANCE.get(packed.dtype, _TOLERANCE_HALF):
        raise UnsupportedModelError(
            "it answers prompts that are computed together otherwise than each alone, so it needs "
            "something that kvweave's attention does not have (such as biases on scores, or state "
            "that runs from token to token)"
        )
    return int(packed.shape[-1])


def prunes_tokens(model: PreTrainedModel, layouts: tuple[LayerLayout, ...]) -> bool:
    """Whether tokens may drop out between the model's layers without harm to those that stay.

    The first row drops out after the first layer; the others must be answered as if it had not.
    For a model that `hooks.prepare` has seen and `check_compatibility` has passed.
    """
    total, gone = sum(_ROWS), _ROWS[0]
    ids, positions, ends = _packed_rows(model)
    dense = _DensePacked(layouts, [0, *ends.tolist()])
    at = ends[1:] - 1

    def drop(tensor: torch.Tensor) -> torch.Tensor:
        if dense.layer is None or tensor.dim() < 2 or tensor.shape[:2] != (1, total):
            return tensor
        if dense.rows[0].stop == gone:
            dense.rows = [slice(row.start - gone, row.stop - gone) for row in dense.rows[1:]]
            at.sub_(gone)
        return tensor[:, gone:]

    def answers() -> torch.Tensor:
        with hooks.implementation(model, hooks.SERVING), hooks.attention(dense):
            output = model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=at,
            )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    with torch.inference_mode():
        expected = answers()
        dense.layer = None
        try:
            with hooks.token_pruning(drop):
                found = answers()
        except Exception:  # whatever a model's code does when tensors get shorter on the way
            return False
    error = (found - expected).norm() / expected.norm()
    return len(dense.rows) < len(_ROWS) and bool(
        error < _TOLERANCE.get(model.dtype, _TOLERANCE_HALF)
    )


def _packed_rows(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows that are tried, one after another: token ids and positions (T), ends (rows)."""
    lengths = torch.tensor(_ROWS, device=model.device)
    vocab = model.config.get_text_config().vocab_size
    ids = torch.arange(1, sum(_ROWS) + 1, device=model.device) * 7919 % vocab
    positions = torch.cat([torch.arange(n, device=model.device) for n in _ROWS])
    return ids, positions, lengths.cumsum(0)


class _DensePacked:
    """What the engine's attention computes, in its plainest form: all scores, masked per row."""

    def __init__(self, layouts: tuple[LayerLayout, ...], starts: list[int]) -> None:
        self.layouts = layouts
        self.rows = [slice(*pair) for pair in pairwise(starts)]
        self.layer: int | None = None
        """The last that was computed."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: None,
        scaling: float | None = None,
        softcap: float | None = None,
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
            outputs.append(functional.softmax(scores, dim=-1).to(v.dtype) @ v)
        return torch.cat(outputs, dim=1).transpose(0, 1)[None], None
