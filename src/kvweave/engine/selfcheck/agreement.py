"""Whether a warm answer is still the cold one: its next token, and the fact that it gives."""

from __future__ import annotations

import re
from typing import Literal

import torch

Verdict = Literal["gold", "decoy", "neither"]


def kl_divergence(cold: torch.Tensor, warm: torch.Tensor) -> torch.Tensor:
    """KL(cold || warm) in nats, row by row: two float (T, V) of logits in, float64 (T) out.

    In float64, since float32 rounding alone would look like 1e-6 nats over a large vocabulary.
    """
    p, q = (logits.double().log_softmax(-1) for logits in (cold, warm))
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)


def words(text: str) -> list[str]:
    """Lower-case runs of letters and digits, thousands separators dropped: 1,024 is one word."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.lower())
    return re.findall(r"[^\W_]+", text)


def verdict(answer: str, gold: str, decoy: str | None = None) -> Verdict:
    """Which fact an answer gives: the one of the two phrases that it says first, as whole words.

    What comes first counts, because a small model that has answered often goes on talking.
    """
    said = words(answer)
    at_gold = _index(said, words(gold))
    at_decoy = None if decoy is None else _index(said, words(decoy))
    if at_gold is None:
        return "neither" if at_decoy is None else "decoy"
    if at_decoy is None:
        return "gold"
    # "450 litres" and "450 litres an hour" begin together: the longer phrase is what was said.
    if at_decoy == at_gold:
        return "gold" if len(words(gold)) >= len(words(decoy or "")) else "decoy"
    return "gold" if at_gold < at_decoy else "decoy"


def _index(said: list[str], phrase: list[str]) -> int | None:
    """Where `phrase` begins among the words of `said`; None if it does not occur."""
    width = len(phrase)
    starts = (at for at in range(len(said) - width + 1) if said[at : at + width] == phrase)
    return next(starts, None) if width else None
