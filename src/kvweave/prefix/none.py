"""The `none` backend: every request computes everything; the reference for the others."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvweave.errors import IntegrityError
from kvweave.kv.journal import atomic
from kvweave.kv.pool import IntArray
from kvweave.prefix.base import CacheBackend
from kvweave.prefix.eviction import Key
from kvweave.prefix.inspector import Refusal
from kvweave.prefix.lease import Lease, RequestView
from kvweave.prefix.plan import Plan


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

    def refusal(
        self, view: RequestView, exact: int, start: int, length: int, donor_start: int
    ) -> Refusal:
        return Refusal("off", "this server keeps no KV once a request has ended")

    def check_structure(self) -> None:
        pass

    @property
    def evictable_pages(self) -> int:
        return 0

    @property
    def cached_pages(self) -> int:
        return 0
