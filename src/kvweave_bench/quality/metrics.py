"""Metrics of a warm answer against its cold one, and 90 % intervals of their means and shares."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
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


Statistic = Literal["mean", "median", "p95"]
_RESAMPLES = 2000
_Z = 1.6448536  # the normal distribution's 95th percentile: 5 % above, 5 % below


class Estimate(NamedTuple):
    """A figure, and the 90 % interval around it."""

    value: float
    low: float
    high: float
    n: int


def bootstrap(figures: Sequence[float], statistic: Statistic = "mean", seed: int = 0) -> Estimate:
    """The statistic of `figures` (one or more), its interval from resampling them with replacement.

    Source: Efron, Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3 (percentiles).
    """
    values = np.asarray(figures, np.float64)
    rng = np.random.default_rng(seed)
    drawn = values[rng.integers(len(values), size=(_RESAMPLES, len(values)))]
    low, high = np.percentile(_of(drawn, statistic), (5, 95))
    return Estimate(float(_of(values[None], statistic)[0]), float(low), float(high), len(values))


def share(hits: int, n: int) -> Estimate:
    """A proportion and Wilson's interval, which is honest at 0 and at n, where resampling is not.

    Source: Wilson, Probable Inference, Journal of the American Statistical Association 22, 1927.
    """
    observed, z2 = hits / n, _Z * _Z
    centre = (observed + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(observed * (1 - observed) / n + z2 / (4 * n * n))
    # The ends are exact there; rounding must not put the figure outside its own interval.
    low = 0.0 if hits == 0 else centre - half
    high = 1.0 if hits == n else centre + half
    return Estimate(observed, low, high, n)


def _of(rows: npt.NDArray[np.float64], statistic: Statistic) -> npt.NDArray[np.float64]:
    if statistic == "mean":
        return np.asarray(rows.mean(axis=1))
    quantile = 50 if statistic == "median" else 95
    return np.asarray(np.percentile(rows, quantile, axis=1))
