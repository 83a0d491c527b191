"""How far a warm answer is from the cold one: in its distributions, its words, and its facts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch

Verdict = Literal["gold", "decoy", "neither"]


def kl_divergence(cold: torch.Tensor, warm: torch.Tensor) -> torch.Tensor:
    """KL(cold || warm) in nats, row by row: two float (T, V) of logits in, float64 (T) out.

    In float64, since float32 rounding alone would look like 1e-6 nats over a large vocabulary.
    """
    p, q = (logits.double().log_softmax(-1) for logits in (cold, warm))
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)


def negative_log_likelihood(logits: torch.Tensor, tokens: Sequence[int]) -> float:
    """Mean over tokens, in nats; row t of `logits`, float (T, V), predicts `tokens[t]`."""
    chosen = torch.tensor(tokens, device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits.double(), chosen))


def perplexity_ratio(cold: torch.Tensor, warm: torch.Tensor, tokens: Sequence[int]) -> float:
    """Perplexity of `tokens` under the warm logits over that under the cold; 1 is no loss."""
    return math.exp(negative_log_likelihood(warm, tokens) - negative_log_likelihood(cold, tokens))


def words(text: str) -> list[str]:
    """Lower-case runs of letters and digits, thousands separators dropped: 1,024 is one word."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.lower())
    return re.findall(r"[^\W_]+", text)


def rouge_l(reference: str, answer: str) -> float:
    """F measure of the longest common subsequence of words; 1 if both have none.

    Source: Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004, section 3.1, with
    equal weight of precision and recall.
    """
    wanted, found = words(reference), words(answer)
    return _f_measure(_longest_common_subsequence(wanted, found), len(wanted), len(found))


def token_f1(reference: str, answer: str) -> float:
    """F measure of the words in common, in any order (as SQuAD scores); 1 if both have none.

    Source: Rajpurkar et al., SQuAD, arXiv 1606.05250, section 6.1.
    """
    wanted, found = Counter(words(reference)), Counter(words(answer))
    return _f_measure((wanted & found).total(), wanted.total(), found.total())


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


def _f_measure(common: int, wanted: int, found: int) -> float:
    return 2 * common / (wanted + found) if wanted + found else 1.0


def _longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    lengths = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for at, other in enumerate(second, 1):
            above = lengths[at]
            lengths[at] = diagonal + 1 if word == other else max(above, lengths[at - 1])
            diagonal = above
    return lengths[-1]


def _index(said: list[str], phrase: list[str]) -> int | None:
    """Where `phrase` begins among the words of `said`; None if it does not occur."""
    width = len(phrase)
    starts = (at for at in range(len(said) - width + 1) if said[at : at + width] == phrase)
    return next(starts, None) if width else None
