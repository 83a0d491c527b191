"""How sure a figure is: intervals that hold the true value 9 times in 10."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

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
