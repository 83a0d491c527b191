"""Exact reuse through a radix tree: prompts and outputs, shared while still being computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from kvweave.errors import IntegrityError
from kvweave.kv.pool import IntArray, PagePool
from kvweave.prefix.base import CacheOptions, PrefixCache
from kvweave.prefix.eventlog import TreeEvents
from kvweave.prefix.events import KVEvent
from kvweave.prefix.eviction import Key
from kvweave.prefix.lease import Lease, RequestView
from kvweave.prefix.node import Node
from kvweave.prefix.outline import TreeOutline, outline
from kvweave.prefix.plan import Plan
from kvweave.prefix.producers import Producers
from kvweave.prefix.tree import RadixTree


class RadixLease(Lease):
    """Holds the path that ends with `node`, at position `published`; None once released."""

    __slots__ = ("node",)

    def __init__(self, view: RequestView, plan: Plan, pages: IntArray, node: Node) -> None:
        super().__init__(view, plan, pages)
        self.node: Node | None = node


class RadixCache(PrefixCache):
    """Every page of the tree is owned by the cache, and by each lease whose path it lies on."""

    name = "radix"

    def __init__(self, pool: PagePool, options: CacheOptions) -> None:
        super().__init__(pool, options)
        self.tree = RadixTree(pool.page_size, options.eviction)
        self._producers = Producers(pool.page_size)
        self._events = TreeEvents(pool.page_size, pool.num_pages) if options.events else None
        if self._events is not None:
            self.tree.observers.append(self._events)

    def match(self, view: RequestView) -> int:
        place = self.tree.find(view.namespace, view.tokens[: self._servable(view)])
        return 0 if place is None else self.tree.length(place)

    def lease(self, view: RequestView) -> RadixLease:
        root = self.tree.root(view.namespace)
        node = self.tree.cut(self.tree.descend(root, view.tokens[: self._servable(view)]))
        self.tree.lock(node)
        pages = self.tree.path_pages(node)
        self.pool.share(pages)
        lease = RadixLease(view, Plan(len(view.tokens), node.end), pages, node)
        self._producers.add(lease, view.tokens)
        return lease

    def publish(self, lease: Lease, tokens: IntArray, computed: int) -> None:
        assert isinstance(lease, RadixLease)
        begin, end = lease.published, self._shareable(lease, computed)
        if end <= begin or lease.node is None:
            return
        first, last = begin // self.page_size, end // self.page_size
        lease.node, canonical = self.tree.extend(
            lease.node, tokens[begin:end], lease.pages[first:last]
        )
        self._converge(lease, first, canonical)
        self.pool.share(lease.pages[first + len(canonical) : last])
        lease.published = end
        self._producers.progress(lease)

    def release(self, lease: Lease) -> None:
        assert isinstance(lease, RadixLease)
        if lease.node is None:
            return
        self._producers.discard(lease)
        self.tree.touch(lease.node, lease.priority)
        self.tree.unlock(lease.node)
        lease.node = None
        self.pool.drop(lease.pages)
        lease.clear()

    def record(self, lease: Lease) -> None:
        assert isinstance(lease, RadixLease)
        super().record(lease)
        if lease.node is not None:
            self.tree.touch(lease.node, lease.priority, hits=1)

    def standing(self, priority: int) -> Key:
        return self.tree.standing(priority)

    def evict(self, pages: int, before: Key | None = None) -> int:
        freed = sum(self.pool.drop(run) for run in self.tree.evict(pages, before))
        self.counters.evicted_pages += freed
        return freed

    def reset(self) -> None:
        pages = list(self.resident())
        self.tree.reset()
        for run in pages:
            self.pool.drop(run)

    def resident(self) -> Iterable[IntArray]:
        runs = [node.pages for node in self.tree.nodes()]
        return [np.concatenate(runs)] if runs else []

    @property
    def evictable_pages(self) -> int:
        return self.tree.evictable_pages

    @property
    def cached_pages(self) -> int:
        return self.tree.cached_pages

    def promised(self, view: RequestView, matched: int) -> int:
        if not self.options.wait_for_producers:
            return 0
        return self._producers.promised(view, matched, self._servable(view))

    def take_events(self) -> list[KVEvent]:
        return [] if self._events is None else self._events.take()

    def outline(self, prompts: Sequence[RequestView], most: int) -> TreeOutline:
        return outline(self.tree, prompts, most)

    def check_structure(self) -> None:
        self.tree.check()

    def check(self, leases: Iterable[Lease]) -> None:
        leases = list(leases)
        super().check(leases)
        ends: Counter[Node] = Counter()
        for lease in leases:
            if isinstance(lease, RadixLease) and lease.node is not None:
                ends[lease.node] += 1
                self._check_path(lease, lease.node)
        for node in self.tree.nodes():
            below = sum(child.locks for child in node.children.values())
            if node.locks - below != ends[node]:
                raise IntegrityError(
                    f"{node.locks - below} locks end at node {node.order}, {ends[node]} leases do"
                )

    def _check_path(self, lease: RadixLease, node: Node) -> None:
        pages = self.tree.path_pages(node)
        if node.end != lease.published or not np.array_equal(pages, lease.pages[: len(pages)]):
            raise IntegrityError(f"request {lease.rid} reads other pages than those on its path")
