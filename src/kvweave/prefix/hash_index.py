"""The index of block hashes: one 64-bit hash per page, seeded by the hash of the page before it.

A page's hash is that of its tokens, seeded by its parent's hash; a prompt's first page is seeded by
its namespace. Hashes are equal in every process and on machines of the same byte order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from typing import TypeAlias

import numpy as np
import xxhash

from kvweave.errors import IntegrityError
from kvweave.kv.journal import Journal
from kvweave.kv.pool import IntArray
from kvweave.prefix.eviction import LOWEST, RANKS, EvictionQueue, Key, Retention
from kvweave.prefix.lease import Namespace

Hasher: TypeAlias = Callable[[bytes, int], int]
"""Maps bytes and a 64-bit seed to a 64-bit hash."""

xxh3: Hasher = xxhash.xxh3_64_intdigest


def namespace_seed(namespace: Namespace, hasher: Hasher = xxh3) -> int:
    """The parent hash of first pages; an absent field differs from an empty one."""
    seed = 0
    for part in astuple(namespace):
        data = b"" if part is None else b"=" + part.encode("utf-8", "surrogatepass")
        seed = hasher(data, seed)
    return seed


def page_hashes(
    tokens: IntArray, page_size: int, parent: int, hasher: Hasher = xxh3
) -> Iterator[int]:
    """The hash of each whole page of `tokens` in turn, computed as it is asked for."""
    data = tokens.tobytes()
    step = page_size * tokens.itemsize
    for at in range(0, len(data) - step + 1, step):
        parent = hasher(data[at : at + step], parent)
        yield parent


NO_PARENT = -1
"""Parent of a prompt's first page."""
_ABSENT = -2  # parent of what is not cached


class HashIndex:
    """Paths of pages, each page with its parent. A holder locks all pages of its path.

    Tokens and pages are int32 arrays.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        eviction: str = "lru",
        hasher: Hasher = xxh3,
        journal: Journal | None = None,
        retained_pages: int = 0,
    ) -> None:
        self.page_size = page_size
        self._journal = Journal() if journal is None else journal
        self.cached_pages = 0
        self.evictable_pages = 0
        """Unlocked pages; what hangs below one of these is unlocked as well."""
        self._pages: dict[int, int] = {}
        """From hash to page."""
        self._heads: dict[int, Namespace] = {}
        """First pages, with their namespaces."""
        self._hasher = hasher
        self._hashes = np.zeros(num_pages, np.uint64)
        self._tokens = np.zeros((num_pages, page_size), np.int32)
        self._parents = np.full(num_pages, _ABSENT, np.int32)
        self._children = np.zeros(num_pages, np.int32)
        self._locks = np.zeros(num_pages, np.int32)
        self._hits = np.zeros(num_pages, np.int32)
        self._priority = np.zeros(num_pages, np.int32)
        self._last_used = np.zeros(num_pages, np.int64)
        self._clock = 0
        self._rank = RANKS[eviction]
        self._queue: EvictionQueue[int] = EvictionQueue(self._key, self._is_leaf)
        self._retention: Retention[int] = Retention(
            self._journal, retained_pages, lambda page: 1, self._requeue
        )

    def find(self, namespace: Namespace, tokens: IntArray, parent: int = NO_PARENT) -> IntArray:
        """The longest cached path of whole pages of `tokens` behind page `parent`; pure."""
        found = []
        for name in self._names(namespace, tokens, parent):
            page = self._pages.get(name)
            if page is None:
                break
            found.append(page)
        pages = np.array(found, np.int32)
        if not len(pages) or (parent == NO_PARENT and self._heads.get(found[0]) != namespace):
            return pages[:0]
        wanted = tokens[: pages.size * self.page_size].reshape(-1, self.page_size)
        differ = (self._tokens[pages] != wanted).any(axis=1)
        differ |= self._parents[pages] != np.concatenate(([parent], pages[:-1]))
        first = int(differ.argmax())
        return pages[:first] if differ[first] else pages

    def extend(
        self, namespace: Namespace, parent: int, tokens: IntArray, pages: IntArray
    ) -> tuple[IntArray, int]:
        """Continue the caller's path, which ends with page `parent`, by `tokens` in `pages`.

        Returns the pages that were cached already, and how many of those behind them now are too:
        fewer than asked for if another path has the next page's hash. Both are locked.
        """
        known = self.find(namespace, tokens, parent)
        self.lock(known)
        if len(known):
            parent = int(known[-1])
        tokens, pages = tokens[len(known) * self.page_size :], pages[len(known) :]
        named: dict[int, int] = {}
        for name, page in zip(self._names(namespace, tokens, parent), pages.tolist(), strict=True):
            if name in self._pages or name in named:
                break
            named[name] = page
        self._enter(namespace, parent, tokens, pages[: len(named)], named)
        return known, len(named)

    def lock(self, pages: IntArray) -> None:
        """Keep the pages of a path until `unlock`."""
        locks = self._locks[pages]
        self._journal.fields(self, "evictable_pages")
        self._journal.items(self._locks, pages)
        self.evictable_pages -= int(np.count_nonzero(locks == 0))
        self._locks[pages] = locks + 1

    def unlock(self, pages: IntArray) -> None:
        """Undo one `lock` of a path."""
        locks = self._locks[pages] - 1
        if len(pages) and int(locks.min()) < 0:
            raise IntegrityError("a page was unlocked that nobody holds")
        self._journal.fields(self, "evictable_pages")
        self._journal.items(self._locks, pages)
        self._locks[pages] = locks
        self.evictable_pages += int(np.count_nonzero(locks == 0))
        if len(pages) and self._is_leaf(last := int(pages[-1])):
            self._queue.push(last)  # the others have a child: the next of the path

    def touch(self, pages: IntArray, priority: int = LOWEST, hits: int = 0) -> None:
        """`pages` were used just now, and hit `hits` times.

        Locked pages are not evicted: a call before `unlock` is enough.
        """
        self._journal.fields(self, "_clock")
        for array in (self._last_used, self._priority, self._hits):
            self._journal.items(array, pages)
        self._clock += 1
        self._last_used[pages] = self._clock
        priority = max(LOWEST, min(priority, -LOWEST - 1))  # what the array can hold
        self._priority[pages] = np.maximum(self._priority[pages], priority)
        self._hits[pages] += hits

    def keep_longer(self, pages: IntArray, seconds: float) -> None:
        """Evict a path after what is not retained, as far from its beginning as may be."""
        self._retention.hold(pages[: self._retention.most_pages][::-1].tolist(), seconds)

    def hashes(self, pages: IntArray) -> list[int]:
        """Of pages that are cached, or were until the last call of `evict`."""
        names: list[int] = self._hashes[pages].tolist()
        return names

    def eviction_key(self, priority: int) -> Key:
        """The key of an entry that a request of `priority` would add now: never hit."""
        return self._rank(0, priority), self._clock + 1

    def evict(self, pages: int, before: Key | None = None) -> IntArray:
        """Forget `pages` pages, or all that are unlocked and go before `before`, tails first.

        Returns which.
        """
        gone: list[int] = []
        self._retention.expire()
        self._journal.fields(self, "cached_pages", "evictable_pages")
        while len(gone) < pages and (leaf := self._queue.lowest(before)) is not None:
            self._journal.on_undo(self._queue.push, leaf)
            gone += self._cut(leaf, pages - len(gone))
        self.cached_pages -= len(gone)
        self.evictable_pages -= len(gone)
        return np.array(gone, np.int32)

    def reset(self) -> None:
        """Forget everything; IntegrityError if anything is locked."""
        if self.evictable_pages < self.cached_pages:
            raise IntegrityError("the cache cannot be cleared while requests hold parts of it")
        self._journal.fields(self, "_pages", "_heads", "_queue", "cached_pages", "evictable_pages")
        for array in (self._parents, self._children):
            self._journal.items(array, slice(None))
        self._pages, self._heads = {}, {}
        self._queue = EvictionQueue(self._key, self._is_leaf)
        self._retention.clear()
        self._parents[:] = _ABSENT
        self._children[:] = 0
        self.cached_pages = self.evictable_pages = 0

    def resident(self) -> IntArray:
        """All cached pages."""
        return np.flatnonzero(self._parents != _ABSENT).astype(np.int32)

    def check(self) -> None:
        """Recompute everything; IntegrityError where it differs."""
        pages = self.resident()
        parents, locks, children = (
            at[pages] for at in (self._parents, self._locks, self._children)
        )
        inner = parents >= 0
        counted = np.bincount(parents[inner], minlength=len(self._parents))
        names = np.fromiter(self._pages.keys(), np.uint64, len(self._pages))
        named = np.fromiter(self._pages.values(), np.int32, len(self._pages))
        leaves = pages[(locks == 0) & (children == 0)].tolist()
        problems = {
            "page count": self.cached_pages != len(pages),
            "evictable count": self.evictable_pages != np.count_nonzero(locks == 0),
            "hashes": not np.array_equal(np.sort(named), pages)
            or not np.array_equal(self._hashes[named], names),
            "parents": (self._parents[parents[inner]] == _ABSENT).any(),
            "first pages": sorted(self._heads) != pages[parents == NO_PARENT].tolist(),
            "child counts": not np.array_equal(children, counted[pages]),
            "locks": (locks[inner] > self._locks[parents[inner]]).any(),
            "eviction queue": not all(leaf in self._queue for leaf in leaves),
        }
        wrong = [name for name, is_wrong in problems.items() if is_wrong]
        if wrong:
            raise IntegrityError(f"the hash index is wrong in {', '.join(wrong)}")

    def check_locks(self, paths: Iterable[IntArray]) -> None:
        """Prove that `paths`, one per holder, are what is locked, and that each is one path."""
        expected = np.zeros(len(self._locks), np.int64)
        for path in paths:
            expected[path] += 1
            if not np.array_equal(self._parents[path[1:]], path[:-1]):
                raise IntegrityError("a request reads pages that do not follow one another")
        wrong = np.flatnonzero((expected != self._locks) & (self._parents != _ABSENT))
        if len(wrong):
            raise IntegrityError(f"{len(wrong)} pages are locked by others than their holders")

    def _names(self, namespace: Namespace, tokens: IntArray, parent: int) -> Iterator[int]:
        if parent == NO_PARENT:
            seed = namespace_seed(namespace, self._hasher)
        else:
            seed = int(self._hashes[parent])
        return page_hashes(tokens, self.page_size, seed, self._hasher)

    def _enter(
        self,
        namespace: Namespace,
        parent: int,
        tokens: IntArray,
        pages: IntArray,
        named: dict[int, int],
    ) -> None:
        """Enter `pages`, new in the index and locked by their one holder, under their names."""
        if not named:
            return
        # What these say of an absent page does not matter, so nothing of it is kept.
        self._hashes[pages] = list(named)
        self._tokens[pages] = tokens[: pages.size * self.page_size].reshape(-1, self.page_size)
        self._children[pages] = 1
        self._children[pages[-1]] = 0
        self._locks[pages] = 1
        self._hits[pages] = 0
        self._priority[pages] = LOWEST

        first = int(pages[0])
        self._journal.fields(self, "cached_pages")
        self._journal.items(self._parents, pages)
        self._journal.keys(self._pages, *named)
        self._parents[first], self._parents[pages[1:]] = parent, pages[:-1]
        if parent == NO_PARENT:
            self._journal.keys(self._heads, first)
            self._heads[first] = namespace
        else:
            self._journal.items(self._children, parent)
            self._children[parent] += 1
        self._pages |= named
        self.cached_pages += len(pages)

    def _cut(self, leaf: int, most: int) -> list[int]:
        """Remove `leaf`, which goes first, and what is above it for as long as that goes next.

        A page that becomes a leaf with the key that just was the smallest need not queue.
        """
        run, key = [leaf], self._key(leaf)
        parent = self._parents.item(leaf)
        while (
            len(run) < most
            and parent != NO_PARENT
            and self._children.item(parent) == 1
            and self._locks.item(parent) == 0
            and self._key(parent) == key
        ):
            run.append(parent)
            parent = self._parents.item(parent)
        names = self._hashes[run].tolist()
        self._journal.keys(self._pages, *names)
        for array in (self._parents, self._children):
            self._journal.items(array, run)
        for name in names:
            del self._pages[name]
        self._parents[run] = _ABSENT
        self._children[run] = 0
        for page in run:
            self._queue.discard(page)  # it may come back as another, with a lower key
        self._retention.drop(run)
        if parent == NO_PARENT:
            self._journal.keys(self._heads, run[-1])
            del self._heads[run[-1]]
        else:
            self._journal.items(self._children, parent)
            self._children[parent] -= 1
            if self._is_leaf(parent):
                self._queue.push(parent)
        return run

    def _is_leaf(self, page: int) -> bool:
        """Whether `page` may be evicted next."""
        held = self._locks.item(page) or self._children.item(page)
        return not held and self._parents.item(page) != _ABSENT

    def _key(self, page: int) -> Key:
        rank = self._rank(self._hits.item(page), self._priority.item(page))
        return rank + self._retention.rank(page), self._last_used.item(page)

    def _requeue(self, page: int) -> None:
        """The page's key has become smaller."""
        self._queue.discard(page)
        if self._is_leaf(page):
            self._queue.push(page)
