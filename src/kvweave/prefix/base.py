"""What all prefix cache backends share, the backend `none`, and the creation of one by name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvweave.errors import ConfigError, IntegrityError
from kvweave.kv.journal import atomic
from kvweave.kv.pool import IntArray, PagePool
from kvweave.plugins import BACKENDS, load
from kvweave.prefix.contract import CacheInspector, CacheOptions, CacheStats, NotReused, PrefixCache
from kvweave.prefix.eviction import Key
from kvweave.prefix.lease import Lease, Plan, RequestView, SharedSpan

if TYPE_CHECKING:
    from kvweave.kv.relocation import KVMover


class CacheBackend(PrefixCache, CacheInspector):
    """Base of the backends; a backend is its own inspector."""

    name: ClassVar[str]

    def __init__(self, pool: PagePool, options: CacheOptions) -> None:
        self.pool = pool
        self.options = options
        self.counters = CacheStats()
        self._journal = pool.journal

    @property
    def page_size(self) -> int:
        return self.pool.page_size

    @property
    def inspector(self) -> CacheInspector:
        return self

    def grow(self, lease: Lease, tokens: int, before: Key | None = None) -> bool:
        if lease.own_slot(tokens) <= len(lease.pages) * self.page_size:
            return True
        return self._lay_out(lease, tokens, (), before)

    def _lay_out(
        self, lease: Lease, tokens: int, shared: Sequence[SharedSpan], before: Key | None = None
    ) -> bool:
        """As `grow`, but without pages of its own for what the lease reads in `shared` ones."""
        own = lease.own_slot(tokens) - sum(run.end - run.start for run in shared)
        need = max(0, -(-own // self.page_size) - len(lease.pages))
        short = need - self.pool.num_free
        if short > 0:
            if short > self.evictable_pages:
                return False
            self.evict(short, before)
        return self._append(lease, need, shared)

    @atomic
    def _append(self, lease: Lease, need: int, shared: Sequence[SharedSpan]) -> bool:
        pages = self.pool.alloc(need)
        if pages is None:
            return False
        lease.keep(self._journal)
        lease.append(pages)
        for run in shared:
            self.pool.share(run.pages)
        lease.shared += tuple(shared)
        return True

    @atomic
    def _shrink(self, lease: Lease, pages: int) -> None:
        """Drop all but the lease's first `pages` pages, and what it shares."""
        lease.keep(self._journal)
        self.pool.drop(lease.pages[pages:])
        for run in lease.shared:
            self.pool.drop(run.pages)
        lease.shared = ()
        lease.truncate(pages)

    @atomic
    def record(self, lease: Lease) -> None:
        counters, plan = self.counters, lease.plan
        hits = dict(counters.hit_tokens)
        hits["exact"] = hits.get("exact", 0) + plan.exact
        for tier in {span.tier for span in plan.spans}:
            hits[tier.value] = hits.get(tier.value, 0) + plan.served_by(tier)
        self._journal.fields(counters, "requests", "query_tokens", "hit_tokens")
        counters.requests += 1
        counters.query_tokens += plan.length
        counters.hit_tokens = hits
        self._touch(lease)

    @abstractmethod
    def _touch(self, lease: Lease) -> None:
        """For backends: what serves `lease` was hit once."""

    @abstractmethod
    def resident(self) -> Iterable[IntArray]:
        """The pages that the cache itself owns, in any order and grouping, each once."""

    @abstractmethod
    def check_structure(self) -> None:
        """Recompute the backend's own sums from scratch; IntegrityError where they differ."""

    def stats(self) -> CacheStats:
        self.counters.evictable_pages = self.evictable_pages
        self.counters.cached_pages = self.cached_pages
        return self.counters

    def why_not_reused(
        self, view: RequestView, exact: int, start: int, length: int, donor_start: int
    ) -> NotReused | None:
        if start != 0 or donor_start != 0:
            return NotReused("position", "this cache reuses text only where it begins both prompts")
        if length < self.page_size:
            return NotReused(
                "page",
                f"a shared beginning is reused in whole pages of {self.page_size} tokens; "
                f"this one has {length}",
            )
        return None

    def check(self, leases: Iterable[Lease]) -> None:
        self.check_structure()
        owned = [pages for lease in leases for pages in lease.owned()]
        self.pool.check([*owned, *self.resident()])

    def _servable(self, view: RequestView) -> int:
        """Most tokens that a match may cover: whole pages, not the last token, `max_exact`."""
        limit = len(view.tokens) - 1
        if view.max_exact is not None:
            limit = min(limit, view.max_exact)
        return max(0, limit) // self.page_size * self.page_size

    def _shareable(self, lease: Lease, computed: int) -> int:
        """How many of `computed` tokens others may see: whole pages, nothing approximate."""
        return lease.plan.publishable(computed) // self.page_size * self.page_size

    def _converge(self, lease: Lease, first: int, canonical: IntArray) -> None:
        """Swap the lease's pages from index `first` on for the cache's, which hold the same."""
        if not len(canonical):
            return
        duplicates = lease.pages[first : first + len(canonical)].copy()
        self._journal.fields(self.counters, "converged_pages")
        self.pool.share(canonical)
        lease.replace(first, canonical)
        self.pool.drop(duplicates)
        self.counters.converged_pages += len(canonical)


class NoCache(CacheBackend):
    name = "none"

    def match(self, view: RequestView) -> int:
        return 0

    def lease(self, view: RequestView) -> Lease:
        return Lease(view, Plan(len(view.tokens)), np.empty(0, np.int32))

    def publish(self, lease: Lease, tokens: IntArray, computed: int) -> None:
        pass

    @atomic
    def release(self, lease: Lease) -> None:
        lease.keep(self._journal)
        self.pool.drop(lease.pages)
        lease.clear()

    def _touch(self, lease: Lease) -> None:
        pass

    def eviction_key(self, priority: int) -> Key:
        return 0, 0

    def evict(self, pages: int, before: Key | None = None) -> int:
        return 0

    def reset(self) -> None:
        if self.pool.num_free < self.pool.num_pages:
            raise IntegrityError("the cache cannot be cleared while requests hold pages")

    def resident(self) -> Iterable[IntArray]:
        return ()

    def why_not_reused(
        self, view: RequestView, exact: int, start: int, length: int, donor_start: int
    ) -> NotReused:
        return NotReused("off", "this server keeps no KV once a request has ended")

    def check_structure(self) -> None:
        pass

    @property
    def evictable_pages(self) -> int:
        return 0

    @property
    def cached_pages(self) -> int:
        return 0


def approximate_backends() -> tuple[str, ...]:
    """Backends whose answers may depend on what else was cached."""
    return tuple(name for name, backend in BACKENDS.items() if backend.exact is not None)


def exact_form(name: str) -> str | None:
    """The backend that serves exactly where `name` is approximate; None if `name` is exact."""
    return BACKENDS[name].exact


def create_cache(
    name: str, pool: PagePool, options: CacheOptions, mover: KVMover | None = None
) -> PrefixCache:
    """The backend called `name`. Those that move KV need a `mover`; the others ignore it."""
    backend = BACKENDS.get(name)
    if backend is None:
        raise ConfigError(
            [f"there is no prefix cache backend {name!r}; there are {', '.join(BACKENDS)}"]
        )
    if backend.moves and mover is None:
        raise ConfigError([f"the backend {name!r} moves KV, but nothing here can move any"])
    create: Any = load(backend.path)
    cache: PrefixCache = create(pool, options, mover) if backend.moves else create(pool, options)
    return cache
