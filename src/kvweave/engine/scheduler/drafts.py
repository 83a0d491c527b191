"""Drafts: proposes an answer's next tokens from known text, as many as are worth their cost.

Answers repeat the prompt, themselves and earlier answers. Where the last tokens of an answer stand
elsewhere, what follows there is proposed, and the forward pass that computes the next token also
verifies all of it: speculative decoding without a draft model. No answer depends on a draft.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict

import numpy as np

from kvweave.config import SpeculativeConfig
from kvweave.engine.scheduler.request import Sequence
from kvweave.kv.pool import IntArray
from kvweave.prefix.contract import PrefixCache

logger = logging.getLogger("kvweave.engine")

_LONGEST_MATCH = 16
"""Tokens of the answer's end that are compared; a longer match says no more."""

_STRONG = 6
"""Tokens that make a match strong: what follows it is mostly repeated too."""

_EXPECTED = ((0.5, 2.0), (4.0, 1.0))
"""Proposals accepted and rejected, as if seen before the first: after weak and strong matches."""

_MEMORY = 48
"""Tokens of an answer after which an observation of drafts has lost two thirds of its weight."""

_SEARCH_AGAIN = 8
"""Tokens of an answer between two searches in cached text, while it has nothing to add."""


class DraftHistory:
    """Results of one answer's drafts, by strength of the match, and the text that they follow."""

    __slots__ = ("_accepted", "_at", "_rejected", "cached", "searched", "strong")

    def __init__(self) -> None:
        self._accepted = [0.0, 0.0]
        self._rejected = [0.0, 0.0]
        self._at = [0, 0]
        self.strong = False
        """The last draft followed a strong match."""
        self.searched = -1
        """Length of the sequence when cached text was searched last."""
        self.cached: tuple[int, IntArray] | None = None
        """Cached text that goes on from that length of the sequence."""

    def acceptance(self, strong: bool, length: int) -> float:
        """The estimated probability that the next proposal is accepted."""
        self._fade(strong, length)
        accepted, rejected = _EXPECTED[strong]
        accepted += self._accepted[strong]
        return accepted / (accepted + rejected + self._rejected[strong])

    def verified(self, strong: bool, length: int, drafted: int, accepted: int) -> None:
        """Of `drafted` proposals, the first `accepted` were right; those behind were not tried."""
        self._fade(strong, length)
        self._accepted[strong] += accepted
        self._rejected[strong] += accepted < drafted

    def _fade(self, strong: bool, length: int) -> None:
        """Old experience loses weight as the answer grows: it may begin to quote at any time."""
        weight = math.exp((self._at[strong] - length) / _MEMORY)
        self._at[strong] = length
        self._accepted[strong] *= weight
        self._rejected[strong] *= weight


class StepCost:
    """How long decoding steps take by their number of tokens: a line fitted to measurements."""

    _MEMORY = 0.98
    _PRIOR = 0.03
    """Time of one more token, as a share of a step of one, before it is known."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        if self._weight:
            # A step beside which another process ran says little about its own work.
            seconds = min(seconds, 3 * self._seconds / self._weight)
        for name, value in (
            ("_weight", 1.0),
            ("_tokens", tokens),
            ("_squares", tokens * tokens),
            ("_seconds", seconds),
            ("_products", tokens * seconds),
        ):
            setattr(self, name, self._MEMORY * getattr(self, name) + value)

    def token_share(self, rows: int) -> float:
        """Time of one more token in a step, as a share of what one row's token takes there.

        A row of a step of `rows` rows has its share of the step. Above 1 no proposal pays.
        """
        if not self._weight:
            return self._PRIOR * rows
        mean_tokens, mean = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean_tokens**2
        slope = self._products / self._weight - mean_tokens * mean
        # The prior counts as much as a spread of two tokens.
        slope = (slope + 4 * self._PRIOR * mean / max(mean_tokens, 1)) / (spread + 4)
        slope = min(max(slope, 0.005 * mean / max(mean_tokens, 1)), mean / max(mean_tokens, 1))
        step = mean + slope * (rows - mean_tokens)
        return rows * slope / max(step, slope)


class Drafter:
    """Proposes drafts for decoding sequences, as long as can be expected to pay."""

    def __init__(self, cache: PrefixCache, config: SpeculativeConfig) -> None:
        self._cache = cache
        self._most = config.num_draft_tokens
        self._least_match = config.ngram_min_match_window_size
        self.cost = StepCost()
        self._histories: defaultdict[Sequence, DraftHistory] = defaultdict(DraftHistory)
        self._failed = False

    def propose(self, sequence: Sequence, most: int, rows: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow `sequence`, in a step that decodes `rows` rows.

        Never raises: an answer needs no draft.
        """
        most = min(most, self._most)
        if most < 1:
            return ()
        try:
            return self._propose(sequence, most, self.cost.token_share(rows))
        except Exception:
            if not self._failed:
                logger.error("drafts failed, answers go on; logged once", exc_info=True)
            self._failed = True
            return ()

    def _propose(self, sequence: Sequence, most: int, cost: float) -> tuple[int, ...]:
        history = self._histories[sequence]
        found, strong = self._cached(sequence, history), True
        if not len(found):
            found, matched = repeated(sequence.tokens, self._least_match, most)
            strong = matched >= _STRONG
        if not len(found):
            return ()
        chance = history.acceptance(strong, sequence.length)
        # The n-th proposal is of use with probability chance^n.
        worth = int(math.log(min(cost, 1)) / math.log(chance)) if chance > cost else 0
        history.strong = strong
        return tuple(found[: min(most, worth)].tolist())

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Note the result of a draft of `drafted` tokens; the sequence has grown by then."""
        history = self._histories[sequence]
        history.verified(history.strong, sequence.length, drafted, accepted)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._histories.pop(sequence, None)

    def _cached(self, sequence: Sequence, history: DraftHistory) -> IntArray:
        """What cached text says after the sequence, if it has said all since it was found."""
        tokens, length = sequence.tokens, sequence.length
        if history.cached is not None:
            at, text = history.cached
            grown = length - at
            if grown < len(text) and np.array_equal(tokens[at:], text[:grown]):
                return text[grown:]
            history.cached = None
        if 0 <= length - history.searched < _SEARCH_AGAIN:
            return tokens[:0]
        history.searched = length
        assert sequence.lease is not None
        text = self._cache.continuation(sequence.lease, tokens, 8 * self._most)
        if len(text):
            history.cached = length, text
            history.searched = -1
        return text


def repeated(tokens: IntArray, least: int, most: int) -> tuple[IntArray, int]:
    """What followed the last tokens when they were there before, up to `most`; matched tokens.

    The longest match counts, of equals the latest. Where what followed reaches the end, it is
    taken to go on like that: the text is periodic.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    matched = 1
    while matched < _LONGEST_MATCH:
        longer = ends[ends >= matched]
        longer = longer[tokens[longer - matched] == tokens[last - matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    if not len(ends) or matched < least:
        return tokens[:0], 0
    following = tokens[ends[-1] + 1 :]
    return (following if len(following) >= most else np.resize(following, most)), matched
