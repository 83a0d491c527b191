"""The waiting requests, in the order in which they should be admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Literal

from kvweave.engine.scheduler.request import Sequence

Policy = Literal["fcfs", "lpm"]

LOOKAHEAD = 128
"""Waiting sequences that one step considers: each is looked up in the cache."""

PATIENCE = 64
"""Admissions by which `lpm` may delay a sequence beyond those that stood before it."""

_BEFORE_ALL = 2**31
"""More tokens than any prefix has: what an overdue sequence counts as having matched."""


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


class WaitingQueue:
    """Sorted by rank: priority first (larger earlier), then arrival.

    Among equal priorities `fcfs` keeps the order of arrival; `lpm` prefers the longest cached
    prefix, except that a sequence which was passed over too often goes before all of them. A lower
    priority waits for as long as higher ones keep coming: that is what priorities ask for.
    """

    def __init__(self, policy: Policy) -> None:
        self._longest_first = policy == "lpm"
        self._items: list[Sequence] = []
        self.admissions = 0
        """How many sequences were admitted so far; whoever admits one counts it here."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    @property
    def first(self) -> Sequence | None:
        """The first in rank."""
        return self._items[0] if self._items else None

    def add(self, sequence: Sequence) -> None:
        if sequence.due is None:  # whoever comes back after a preemption keeps its claim
            sequence.due = self.admissions + len(self._items) + PATIENCE
        insort(self._items, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        at = bisect_left(self._items, sequence.rank, key=_rank)
        if at == len(self._items) or self._items[at] is not sequence:
            raise KeyError(sequence.group.request.rid)
        del self._items[at]

    def candidates(self, match: Callable[[Sequence], int]) -> Iterator[tuple[Sequence, int]]:
        """Whom to admit, first to last, each with its `match`: the tokens of its cached prefix.

        Sequences may be taken out while this runs.
        """
        window = self._items[:LOOKAHEAD]
        if not self._longest_first:
            for sequence in window:
                yield sequence, match(sequence)
            return
        matched = [(sequence, match(sequence)) for sequence in window]
        matched.sort(key=lambda pair: self._longest_prefix_order(*pair))
        yield from matched

    def _longest_prefix_order(self, sequence: Sequence, matched: int) -> tuple[int, int, int]:
        priority, arrival = sequence.rank
        overdue = sequence.due is not None and self.admissions >= sequence.due
        return (priority, -_BEFORE_ALL if overdue else -matched, arrival)
