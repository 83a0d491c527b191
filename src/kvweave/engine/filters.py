"""min_p, top_k and top_p: which tokens may be sampled at all.

Each sets the logits of the others to minus infinity, in place, row by row with its own parameter.
The order is min_p, top_k, top_p, each on the distribution that the one before it left, after the
temperature.
"""

from __future__ import annotations

import torch

_CANDIDATES = 256
"""Tokens that nearly always hold a row's top_p mass. Finding them takes a fiftieth of a sort."""


def keep_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Drop tokens less likely than `min_p` (R), in [0, 1], times the likeliest of logits (R, V)."""
    least = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(-1)
    logits.masked_fill_(logits < least, -torch.inf)


def keep_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> None:
    """Keep the `top_k` likeliest, and whatever equals the last of them. top_k int64 (R), 0: all."""
    vocabulary = logits.shape[-1]
    k = torch.where(top_k > 0, top_k, vocabulary).clamp_(max=vocabulary)
    limited = (k < vocabulary).nonzero().squeeze(-1)
    if not len(limited):
        return
    k = k[limited]
    rows = logits[limited]
    best = rows.topk(int(k.max()), dim=-1).values
    least = best.gather(-1, (k - 1).unsqueeze(-1))
    logits[limited] = rows.masked_fill_(rows < least, -torch.inf)


def keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """Keep the fewest, likeliest tokens whose mass reaches `top_p` (R), and ties of the last.

    Nucleus sampling, arXiv 1904.09751.
    """
    _keep_top_p(logits, top_p, (top_p < 1).nonzero().squeeze(-1), _CANDIDATES)


def _keep_top_p(
    logits: torch.Tensor, top_p: torch.Tensor, rows: torch.Tensor, candidates: int
) -> None:
    if not len(rows):
        return
    chosen, wanted = logits[rows], top_p[rows].unsqueeze(-1)
    candidates = min(candidates, chosen.shape[-1])
    best = chosen.topk(candidates, dim=-1).values
    mass = (best - chosen.logsumexp(dim=-1, keepdim=True)).exp_().cumsum(dim=-1)
    # The last candidate that is kept is the first whose mass, with all before it, reaches top_p.
    last = (mass < wanted).sum(dim=-1, keepdim=True)
    enough = (last < candidates).squeeze(-1)
    if candidates == chosen.shape[-1]:
        enough.fill_(True)
        last.clamp_(max=candidates - 1)
    least = best.gather(-1, last.clamp(max=candidates - 1))
    kept = chosen.masked_fill(chosen < least, -torch.inf)
    logits[rows[enough]] = kept[enough]
    _keep_top_p(logits, top_p, rows[~enough], 16 * candidates)
