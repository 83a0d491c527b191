"""Eviction order of cached pages: policies, retention, and a queue of candidates.

Every policy orders by a rank, and by recency within a rank. Both only grow, so the queue can
refresh its entries lazily; where retention ends, the entry is queued anew.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeAlias, TypeVar

from kvweave.kv.journal import Journal

Item = TypeVar("Item")
Key: TypeAlias = tuple[int, int]
"""Rank, then the logical time of the last use. Smaller goes first."""

LOWEST = -(2**31)
"""Priority of what no request has used yet."""

Rank: TypeAlias = Callable[[int, int], int]
"""From hits and priority to a rank."""

RANKS: dict[str, Rank] = {
    "lru": lambda hits, priority: 0,
    "lfu": lambda hits, priority: hits,
    # Two segments: entries that were never hit go first.
    "slru": lambda hits, priority: min(hits, 1),
    "priority": lambda hits, priority: priority,
}


class EvictionQueue(Generic[Item]):
    """Candidates for eviction, smallest key first, at O(log n) for each push and pop.

    An item has at most one valid entry, whose key may lag behind the item's own. `lowest` refreshes
    such a key, and drops an item that is no candidate any more. So the queue need not be told when
    an item is used, locked or extended. It may hold more than the candidates, never fewer: an item
    that becomes one is pushed before it does, and leaves after it has stopped being one.
    """

    def __init__(self, key: Callable[[Item], Key], is_candidate: Callable[[Item], bool]) -> None:
        self._key = key
        self._is_candidate = is_candidate
        self._heap: list[tuple[Key, int, Item]] = []
        self._queued: dict[Item, int] = {}
        """From an item to the order of its valid entry; other entries are stale."""
        self._pushes = 0  # breaks ties: first in, first out

    def push(self, item: Item) -> None:
        """Consider `item`, now a candidate; harmless if it is queued already."""
        if item not in self._queued:
            self._pushes += 1
            heapq.heappush(self._heap, (self._key(item), self._pushes, item))
            self._queued[item] = self._pushes

    def discard(self, item: Item) -> None:
        """Forget `item`; harmless if it is not queued."""
        self._queued.pop(item, None)

    def lowest(self, before: Key | None = None) -> Item | None:
        """The candidate with the smallest key, if that is below `before`; None without one.

        It stays queued for as long as it is a candidate.
        """
        while self._heap:
            key, order, item = self._heap[0]
            if self._queued.get(item) != order:
                heapq.heappop(self._heap)
            elif not self._is_candidate(item):
                del self._queued[item]
            elif (now := self._key(item)) != key:
                heapq.heapreplace(self._heap, (now, order, item))
            elif before is not None and key >= before:
                return None
            else:
                return item
        return None

    def first(self, count: int) -> list[Item]:
        """Up to `count` candidates, smallest key first; changes nothing."""
        found: list[Item] = []
        heap = self._heap.copy()
        while heap and len(found) < count:
            key, order, item = heap[0]
            valid = self._queued.get(item) == order and self._is_candidate(item)
            if valid and (now := self._key(item)) != key:
                heapq.heapreplace(heap, (now, order, item))
                continue
            heapq.heappop(heap)
            if valid:
                found.append(item)
        return found

    def __contains__(self, item: Item) -> bool:
        return item in self._queued


_RETAINED = 2**40
"""Added to the rank of what is retained: more than any policy's."""


class Retention(Generic[Item]):
    """Items that are evicted after all others, until a time and up to a number of pages.

    Beyond that number, those that were retained longest ago lose their privilege. No item is
    protected for good: where only retained ones are left, they are evicted in the usual order.
    """

    def __init__(
        self,
        journal: Journal,
        most_pages: int,
        pages_of: Callable[[Item], int],
        requeue: Callable[[Item], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`requeue` is told of an item whose key has become smaller."""
        self.most_pages = most_pages
        self._journal = journal
        self._pages_of = pages_of
        self._requeue = requeue
        self._clock = clock
        self._until: dict[Item, float] = {}
        """In the order in which items lose their privilege; replaced, never changed."""
        self._soonest = math.inf

    def rank(self, item: Item) -> int:
        """What retention adds to the rank of `item`."""
        return _RETAINED if item in self._until else 0

    def hold(self, path: Iterable[Item], seconds: float) -> None:
        """Retain a path's items, the last of the path first, from now on."""
        now = self._clock()
        held = {item: max(now + seconds, self._until.get(item, 0.0)) for item in path}
        until = {item: end for item, end in self._until.items() if item not in held} | held
        pages = {item: self._pages_of(item) for item in until}
        surplus = sum(pages.values()) - self.most_pages
        for item in list(until):
            if surplus > 0 or until[item] <= now:
                surplus -= pages[item]
                del until[item]
        self._replace(until)

    def split(self, item: Item, upper: Item) -> None:
        """`upper` was cut off `item` and comes before it on its path."""
        if item in self._until:
            self._replace({**self._until, upper: self._until[item]})

    def drop(self, items: Iterable[Item]) -> None:
        """These are not cached any more."""
        gone = {item for item in items if item in self._until}
        if gone:
            self._replace({item: end for item, end in self._until.items() if item not in gone})

    def expire(self) -> None:
        """End what lasted until now; cheap where nothing did."""
        now = self._clock()
        if now >= self._soonest:
            self._replace({item: end for item, end in self._until.items() if end > now})

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._journal.fields(self, "_until", "_soonest")
        self._until, self._soonest = {}, math.inf

    def _replace(self, until: dict[Item, float]) -> None:
        self._journal.fields(self, "_until", "_soonest")
        demoted = [item for item in self._until if item not in until]
        self._until, self._soonest = until, min(until.values(), default=math.inf)
        for item in demoted:
            self._requeue(item)
