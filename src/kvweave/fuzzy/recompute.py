"""Strategies of selective recompute: which tokens of moved spans to compute again.

KV that was moved is that of the right token at the right position, but it was computed behind
another text. That matters for few tokens (CacheBlend, arXiv 2405.16444, section 4); a strategy says
how to find them. Some is known when the plan is made: where spans begin, and where the prompt
differs from its donor. The rest shows in the forward pass, whose part of the work
is `engine.execution.selective_recompute`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import BoolArray, DeferredRecompute, Span, Tier

_FOLLOWERS = 8
"""Tokens after a place where the prompt differs from its donor that come first in any budget."""
_MANY = 3
"""From so many spans on whose text before them changed, more than their first tokens matters."""
_SHARE_OF_MANY = 0.1
BESIDE_CHOICE = 8
"""First tokens of each of them that are computed again, where the pass chooses that share."""
_EDIT = 64
"""The longest such place: a longer one is other text, and not another fact in the same text."""


@dataclass(frozen=True, slots=True)
class Stop:
    """After `depth` of the layers (two at least), `keep` x the budget go on."""

    depth: float
    keep: float = 1.0


@dataclass(frozen=True, slots=True)
class Strategy:
    """What makes a token worth computing again.

    stops: where the keys and values computed so far are compared with the moved ones, the tokens
    that deviate least falling out; without stops, closeness to the seam before it counts. question:
    the power of the attention that the prompt's last fresh tokens pay to it when all that is moved
    is taken as it is, by which the deviation is multiplied; 0: it is never worked out. entry: how
    many times the budget go through the first layers, those with the most of that attention; 0:
    all.
    """

    stops: tuple[Stop, ...] = ()
    question: float = 0.0
    entry: float = 0.0

    @property
    def deferred(self) -> bool:
        """Chooses in the forward pass."""
        return bool(self.stops)

    def stops_by_layer(self, layers: int) -> dict[int, float]:
        """What share of the budget goes on after a layer, of a model of `layers` layers."""
        keeps: dict[int, float] = {}
        for stop in self.stops:
            layer = max(2, round(stop.depth * layers)) - 1
            # Where few layers make stops fall together, it is the budget itself that is kept.
            if stop.keep >= 1 or layer not in keeps:
                keeps[layer] = stop.keep
        return keeps


SEAMS = "seams"
STRATEGIES = {
    "mix": Strategy(
        question=0.75,
        entry=2.5,
        stops=(Stop(1 / 15, 1.8), Stop(1 / 6, 1.2), Stop(0.3), Stop(0.5, 0.7), Stop(5 / 6, 0.3)),
    ),
    "deviation": Strategy(stops=(Stop(0),)),
    SEAMS: Strategy(),
}


def choose(
    spans: Sequence[Span],
    share: float | None,
    strategy: str,
    seam_tokens: int = 0,
    continued: Collection[Span] = (),
) -> tuple[IntArray, DeferredRecompute | None]:
    """Positions to compute again, and what the forward pass selects of `share` x all moved tokens.

    The first `seam_tokens` of every moved span are computed again, up to half of it, except for
    spans in `continued`, whose nearest earlier text is the donor's own. They come beside `share`.
    A share of None depends on the number of those spans: of many, the pass chooses some tokens, and
    fewer first ones are computed again. It is 0 without `seam_tokens`.
    Tokens just behind an edit come first in the share whatever the strategy: they would carry the
    donor's fact into the recipient's answer. Paraphrases are served whole, as they were verified:
    a mix of two wordings may have a meaning that neither has.
    """
    spans = [span for span in spans if span.tier is Tier.MOVED]
    if not spans:
        return np.zeros(0, np.int32), None
    lengths = np.array([span.length for span in spans])
    ahead = np.array([span not in continued for span in spans])
    deferred = STRATEGIES[strategy].deferred
    if share is None:
        many = deferred and seam_tokens > 0 and int(ahead.sum()) >= _MANY
        share = _SHARE_OF_MANY if many else 0.0
        seam_tokens = min(seam_tokens, BESIDE_CHOICE) if many else seam_tokens
    seams = np.minimum(seam_tokens * ahead, lengths // 2)
    budget = round(share * int(lengths.sum()))
    edits = np.minimum(lengths, _FOLLOWERS) * _edited(spans)
    heads = np.maximum(seams, _levelled(np.zeros_like(lengths), edits, budget))
    total = min(budget + int(seams.sum()), int(lengths.sum()))
    if not deferred:
        return _first(spans, _levelled(heads, lengths, total) if budget else heads), None
    left = total - int(heads.sum()) if budget else 0
    return _first(spans, heads), DeferredRecompute(strategy, left) if left > 0 else None


def _edited(spans: Sequence[Span]) -> BoolArray:
    """Whether a span goes on in its predecessor's donor after a short stretch of other tokens."""
    edited = np.zeros(len(spans), np.bool_)
    for at in range(1, len(spans)):
        before, span = spans[at - 1], spans[at]
        gap = span.start - before.end
        donor_gap = span.donor_start - (before.donor_start + before.length)
        edited[at] = min(gap, donor_gap) >= 0 and 0 < max(gap, donor_gap) <= _EDIT
    return edited


def _levelled(least: IntArray, most: IntArray, budget: int) -> IntArray:
    """`budget` in parts as equal as the bounds of each allow; all of `most` if that is less."""
    if int(most.sum()) <= budget:
        return most
    level = 0
    for step in 1 << np.arange(int(most.max()).bit_length())[::-1]:
        if int(np.clip(level + step, least, most).sum()) <= budget:
            level += int(step)
    parts: IntArray = np.clip(level, least, most)
    growing = np.flatnonzero((parts == level) & (parts < most))
    parts[growing[: budget - int(parts.sum())]] += 1
    return parts


def _first(spans: Sequence[Span], heads: IntArray) -> IntArray:
    """The first `heads[i]` positions of every span: int32, ascending."""
    runs = [
        np.arange(span.start, span.start + int(head), dtype=np.int32)
        for span, head in zip(spans, heads, strict=True)
    ]
    return np.concatenate(runs)
