"""How far a warm answer is from the cold one, in its likelihood and its words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from kvweave.engine.selfcheck.measure import words


def negative_log_likelihood(logits: torch.Tensor, tokens: Sequence[int]) -> float:
    """Mean over tokens, in nats; row t of `logits`, float (T, V), predicts `tokens[t]`."""
    chosen = torch.tensor(tokens, device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits.double(), chosen))


def perplexity_ratio(cold: torch.Tensor, warm: torch.Tensor, tokens: Sequence[int]) -> float:
    """Perplexity of `tokens` under the warm logits over that under the cold; 1 is no loss."""
    return math.exp(negative_log_likelihood(warm, tokens) - negative_log_likelihood(cold, tokens))


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
