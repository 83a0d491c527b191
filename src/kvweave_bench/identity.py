"""The tokens that earlier prompts could lend, and a check that lent tokens are the right ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Tier
from kvweave_bench.driver import Answer
from kvweave_bench.workloads.oracle import shared_share


class Donors:
    """The prompts that an engine served so far, as far as later ones may reuse them.

    A prompt that reused moved text is known only up to there: nothing approximate is ever lent on.
    """

    def __init__(self) -> None:
        self._known: list[IntArray] = []

    def add(self, answer: Answer) -> None:
        """The engine has now served `answer`."""
        exact = answer.plan[0].start if answer.plan else len(answer.prompt)
        self._known.append(answer.prompt[:exact])

    def oracle_share(self, prompt: IntArray) -> float:
        """The share of `prompt` inside runs of at least 32 tokens that a donor holds."""
        return shared_share(prompt, self._known)

    def identity(self, answer: Answer) -> float:
        """The share of positions served by moved spans that hold the prompt's own token; 1 if none.

        A span is checked against the tokens at the positions that it names in a donor: all tokens
        of a span have to be those of one donor.
        """
        moved = [span for span in answer.plan if span.tier is Tier.MOVED]
        served = sum(span.length for span in moved)
        right = 0
        for span in moved:
            wanted = answer.prompt[span.start : span.end]
            right += max(
                (_equal(wanted, donor[span.donor_start :]) for donor in self._known), default=0
            )
        return right / served if served else 1.0


def served_positions(answer: Answer) -> npt.NDArray[np.bool_]:
    """Which positions of the prompt were not computed but taken from an earlier one's KV."""
    served = np.zeros(len(answer.prompt), np.bool_)
    served[: answer.usage.cached_tokens] = True
    for span in answer.plan:
        served[span.start : span.end] = True
    return served


def _equal(wanted: IntArray, held: IntArray) -> int:
    shared = min(len(wanted), len(held))
    return int(np.count_nonzero(wanted[:shared] == held[:shared]))
