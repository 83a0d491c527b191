"""The `hash` backend: exact reuse by block hashes, one look-up per page, no tree."""

from __future__ import annotations

from collections.abc import Iterable

from kvweave.errors import IntegrityError
from kvweave.kv.journal import Journal, atomic
from kvweave.kv.pool import IntArray, PagePool
from kvweave.prefix.base import CacheBackend
from kvweave.prefix.contract import CacheOptions
from kvweave.prefix.events import EventLog, KVEvent
from kvweave.prefix.eviction import Key
from kvweave.prefix.hash_index import NO_PARENT, Hasher, HashIndex, xxh3
from kvweave.prefix.lease import Lease, Plan, RequestView


class HashLease(Lease):
    """Holds its published pages, which are the first of `pages`."""

    __slots__ = ("live",)

    def __init__(self, view: RequestView, plan: Plan, pages: IntArray) -> None:
        super().__init__(view, plan, pages)
        self.live = True

    def keep(self, journal: Journal) -> None:
        super().keep(journal)
        journal.fields(self, "live")


class HashCache(CacheBackend):
    """Each page is cached under one hash; duplicates converge to the page that came first."""

    name = "hash"

    def __init__(self, pool: PagePool, options: CacheOptions, hasher: Hasher = xxh3) -> None:
        super().__init__(pool, options)
        self.index = HashIndex(
            pool.num_pages,
            pool.page_size,
            options.eviction,
            hasher,
            pool.journal,
            int(options.retention_share * pool.num_pages),
        )
        self._log = EventLog(pool.page_size, pool.journal) if options.events else None
        self._live = 0

    def match(self, view: RequestView) -> int:
        return len(self._find(view)) * self.page_size

    @atomic
    def lease(self, view: RequestView) -> HashLease:
        pages = self._find(view)
        self._journal.fields(self, "_live")
        self.index.lock(pages)
        self.pool.share(pages)
        self._live += 1
        return HashLease(view, Plan(len(view.tokens), len(pages) * self.page_size), pages)

    @atomic
    def publish(self, lease: Lease, tokens: IntArray, computed: int) -> None:
        assert isinstance(lease, HashLease)
        begin, end = lease.published, self._shareable(lease, computed)
        if end <= begin or not lease.live:
            return
        first, last = begin // self.page_size, end // self.page_size
        lease.keep(self._journal)
        parent = int(lease.pages[first - 1]) if first else NO_PARENT
        known, taken = self.index.extend(
            lease.namespace, parent, tokens[begin:end], lease.pages[first:last]
        )
        self._converge(lease, first, known)
        fresh = first + len(known)
        self.pool.share(lease.pages[fresh : fresh + taken])
        if self._log is not None and taken:
            self._log_stored(self._log, lease, tokens, fresh, fresh + taken)
        lease.published = (fresh + taken) * self.page_size

    @atomic
    def release(self, lease: Lease) -> None:
        assert isinstance(lease, HashLease)
        if not lease.live:
            return
        lease.keep(self._journal)
        self._journal.fields(self, "_live")
        lease.live = False
        self._live -= 1
        published = self._published(lease)
        self.index.touch(published, lease.priority)
        if lease.retain_seconds:
            self.index.keep_longer(published, lease.retain_seconds)
        self.index.unlock(published)
        self.pool.drop(lease.pages)
        lease.clear()

    def _touch(self, lease: Lease) -> None:
        self.index.touch(self._published(lease), lease.priority, hits=1)

    def eviction_key(self, priority: int) -> Key:
        return self.index.eviction_key(priority)

    @atomic
    def evict(self, pages: int, before: Key | None = None) -> int:
        self._journal.fields(self.counters, "evicted_pages")
        gone = self.index.evict(pages, before)
        if self._log is not None and len(gone):
            self._log.removed(self.index.hashes(gone))
        self.counters.evicted_pages += len(gone)
        return self.pool.drop(gone)

    @atomic
    def reset(self) -> None:
        if self._live:
            raise IntegrityError(f"the cache cannot be cleared while {self._live} requests run")
        pages = self.index.resident()
        self.index.reset()
        self.pool.drop(pages)
        if self._log is not None:
            self._log.cleared()

    def resident(self) -> Iterable[IntArray]:
        return [self.index.resident()]

    @property
    def evictable_pages(self) -> int:
        return self.index.evictable_pages

    @property
    def cached_pages(self) -> int:
        return self.index.cached_pages

    def take_events(self) -> list[KVEvent]:
        return [] if self._log is None else self._log.take()

    def check_structure(self) -> None:
        self.index.check()

    def check(self, leases: Iterable[Lease]) -> None:
        leases = [lease for lease in leases if isinstance(lease, HashLease) and lease.live]
        super().check(leases)
        self.index.check_locks([self._published(lease) for lease in leases])

    def _find(self, view: RequestView) -> IntArray:
        return self.index.find(view.namespace, view.tokens[: self._servable(view)])

    def _published(self, lease: Lease) -> IntArray:
        return lease.pages[: lease.published // self.page_size]

    def _log_stored(
        self, log: EventLog, lease: Lease, tokens: IntArray, first: int, last: int
    ) -> None:
        pages, size = lease.pages, self.page_size
        parent = self.index.hashes(pages[first - 1 : first])[0] if first else None
        hashes = self.index.hashes(pages[first:last])
        log.stored(hashes, parent, tokens[first * size : last * size], lease.namespace)
