"""The waiting requests: the order in which they are tried, and whether one may start now."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from kvweave.engine.scheduler.request import Sequence
from kvweave.prefix.contract import PrefixCache

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
        """How many sequences the scheduler has admitted so far."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    @property
    def first(self) -> Sequence | None:
        """The first in rank."""
        return self._items[0] if self._items else None

    def add(self, sequence: Sequence) -> None:
        if sequence.due is None:  # a preempted sequence keeps its claim
            sequence.due = self.admissions + len(self._items) + PATIENCE
        insort(self._items, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        at = bisect_left(self._items, sequence.rank, key=_rank)
        if at == len(self._items) or self._items[at] is not sequence:
            raise KeyError(sequence.group.request.rid)
        del self._items[at]

    def candidates(self, match: Callable[[Sequence], int]) -> Iterator[tuple[Sequence, int]]:
        """Sequences to admit, in order, each with its `match`: the tokens of its cached prefix.

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


_RESERVE_START, _RESERVE_LEAST, _RESERVE_RAISE, _RESERVE_DECAY = 0.3, 0.1, 0.2, 0.99
_LONGEST_RESERVE = 4096
"""Output tokens beyond these are not reserved for: few answers get there."""

_STALL_STEPS = 64
"""Steps, beside four per slot of a page, to wait for a producer that makes no progress."""


class Admission:
    """Keeps room for what runs, and keeps requests from computing what others are computing.

    Room: a sequence starts if the pages of its own tokens are there, beside those that running ones
    still need and a share of what they all may generate. The share rises with every preemption and
    decays with every step, so that preemptions stay rare without leaving memory idle.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._page_size = cache.page_size
        self._share = _RESERVE_START
        self._stall_limit = _STALL_STEPS + 4 * cache.page_size

    def stepped(self) -> None:
        self._share = max(_RESERVE_LEAST, self._share * _RESERVE_DECAY)

    def preempted(self) -> None:
        self._share = min(1.0, self._share + _RESERVE_RAISE)

    def may_fit(
        self, sequence: Sequence, matched: int, running: Iterable[Sequence], freed: int = 0
    ) -> bool:
        """Whether leasing is worth a try beside `running`, once `freed` more pages are free.

        An estimate: it is not known yet which pages the match consists of, nor what will be shared
        behind it; the lease tells.
        """
        return self._surplus(sequence, matched, running) + freed >= sequence.surplus_needed

    def lacking(self, sequence: Sequence, running: Iterable[Sequence]) -> int:
        """Pages missing for the leased `sequence` to stay beside `running`; 0 or less if it can."""
        assert sequence.lease is not None
        growth = self._growth(sequence, sequence.length + 1)
        return self._needed(sequence, growth, running) - self._room()

    def hold_back(
        self, sequence: Sequence, matched: int, running: Iterable[Sequence], lacking: int
    ) -> None:
        """Do not lease `sequence` again before `lacking` more pages are there.

        It had matched unused pages, which counted as room before it took them.
        """
        sequence.surplus_needed = self._surplus(sequence, matched, running) + lacking

    def awaits_producer(self, sequence: Sequence, matched: int) -> bool:
        """Whether a running request is about to publish more of this prefix than is cached.

        Bounded: once the producer has published nothing new for long, the sequence goes ahead.
        """
        group = sequence.group
        if group.running and not group.prompt_computed:
            return True  # a sibling is computing the very same prompt
        pending = self._cache.pending_prefix(sequence.view(), matched)
        if pending <= matched:
            return False
        if matched > sequence.best_match:
            sequence.best_match = matched
            sequence.stalled = 0
        sequence.stalled += 1
        return sequence.stalled <= self._stall_limit

    def _surplus(self, sequence: Sequence, matched: int, running: Iterable[Sequence]) -> int:
        """Pages that would be left, at best."""
        held = matched + self._cache.most_shared(sequence.view(), matched)
        growth = self._pages(sequence.length + 1) - held // self._page_size
        return self._room() - self._needed(sequence, growth, running)

    def _room(self) -> int:
        return self._cache.pool.num_free + self._cache.evictable_pages

    def _needed(self, sequence: Sequence, growth: int, running: Iterable[Sequence]) -> int:
        """Pages that must be free or evictable for `sequence`, which lacks `growth`, to run."""
        needed = growth + self._reserve(sequence)
        for other in running:
            if other.lease is not None and other is not sequence:
                needed += self._growth(other, other.length) + self._reserve(other)
        return needed

    def _growth(self, sequence: Sequence, tokens: int) -> int:
        """Pages that the leased `sequence` lacks for its first `tokens`."""
        lease = sequence.lease
        assert lease is not None
        return max(0, self._pages(lease.own_slot(tokens)) - len(lease.pages))

    def _reserve(self, sequence: Sequence) -> int:
        to_come = min(sequence.limit - sequence.length, _LONGEST_RESERVE)
        return self._pages(int(to_come * self._share))

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)
