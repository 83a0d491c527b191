"""Eviction order of cached pages: policies, and a queue of candidates.

Every policy orders by a rank, and by recency within a rank. Both only grow, so the queue can
refresh its entries lazily.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

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
