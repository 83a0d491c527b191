"""Log probabilities of chosen tokens and of the likeliest alternatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvweave.engine.types import TokenLogprob

_BLOCK = 32
"""Rows of a prompt whose whole distributions exist at a time."""


def token_logprobs(
    logprobs: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprob]:
    """One result per row of `logprobs` (R, V), with the row's `counts` best alternatives."""
    chosen = torch.tensor(token_ids, device=logprobs.device).unsqueeze(-1)
    own = logprobs.gather(-1, chosen).squeeze(-1).tolist()
    most = min(max(counts, default=0), logprobs.shape[-1])
    best = logprobs.topk(most, dim=-1)
    ids, values = best.indices.tolist(), best.values.tolist()
    tops = [
        tuple(zip(ids[row][:count], values[row][:count], strict=True))
        for row, count in enumerate(counts)
    ]
    return [TokenLogprob(*parts) for parts in zip(token_ids, own, tops, strict=True)]


def prompt_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], count: int
) -> list[TokenLogprob]:
    """How likely each of `token_ids` was, given `logits` (R, V) of the position before it."""
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), _BLOCK):
        block = token_ids[start : start + _BLOCK]
        logprobs = logits[start : start + len(block)].log_softmax(dim=-1)
        found += token_logprobs(logprobs, block, [count] * len(block))
    return found
