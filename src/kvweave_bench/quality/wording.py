"""Figures as people read them, in HTML."""

from __future__ import annotations

import difflib
import math
from html import escape

from kvweave_bench.quality.intervals import Estimate


def nats(value: float) -> str:
    """A divergence: two digits that count, a power of ten where it is tiny."""
    if value < 1e-7:
        return "0"
    if value >= 1e-3:
        return f"{value:.2g}"
    power = math.floor(math.log10(value))
    return f"{value / 10.0**power:.1f}·10<sup>&minus;{-power}</sup>"


def percent(value: float) -> str:
    """A share; a decimal only close to all or nothing, where it makes a difference."""
    near_the_end = 0 < min(value, 1 - value) < 0.0995
    return f"{100 * value:.1f} %" if near_the_end else f"{100 * value:.0f} %"


def times(value: float) -> str:
    """How many times sooner."""
    return (
        f"{value:.2f}&times;"
        if value < 3
        else f"{value:.1f}&times;"
        if value < 20
        else f"{value:.0f}&times;"
    )


def ratio(value: float) -> str:
    """A perplexity ratio or an F measure: three decimals."""
    return f"{value:.3f}"


def count(estimate: Estimate) -> str:
    """A share of n as what was counted."""
    return f"{round(estimate.value * estimate.n)} of {estimate.n}"


_FORMATS = {
    "kl_mean": nats,
    "kl_median": nats,
    "kl_p95": nats,
    "kl_answer": nats,
    "ppl_ratio": ratio,
    "rouge_l": ratio,
    "token_f1": ratio,
    "first_token_speedup": times,
}


def figure(metric: str, estimate: Estimate) -> str:
    """A figure, and under it the interval that holds it 9 times in 10."""
    show = _FORMATS.get(metric, percent)
    low, high = show(estimate.low), show(estimate.high)
    return f"{show(estimate.value)}<small>{low}&ndash;{high}</small>"


def marked(text: str, reference: str) -> str:
    """`text`, its words marked where they are not those of `reference`."""
    ours, theirs = text.split(), reference.split()
    parts = []
    for kind, _, _, start, end in difflib.SequenceMatcher(None, theirs, ours, False).get_opcodes():
        words = escape(" ".join(ours[start:end]))
        if words:
            parts.append(words if kind == "equal" else f"<mark>{words}</mark>")
    return " ".join(parts)
