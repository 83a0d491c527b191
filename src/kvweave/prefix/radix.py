"""The `radix` backend: exact reuse of prompts and outputs, shared while being computed."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from kvweave.errors import IntegrityError
from kvweave.kv.journal import Journal, atomic
from kvweave.kv.pool import IntArray, PagePool
from kvweave.prefix.base import CacheBackend
from kvweave.prefix.contract import CacheOptions, NodeSnapshot, TreeSnapshot
from kvweave.prefix.events import KVEvent, TreeEvents
from kvweave.prefix.eviction import Key
from kvweave.prefix.lease import Lease, Namespace, Plan, RequestView
from kvweave.prefix.tree import Node, RadixTree, common_prefix, upwards


class PendingPrefixes:
    """Leases that still have prompt pages to publish, by namespace and first page."""

    def __init__(self, page_size: int, journal: Journal) -> None:
        self._page_size = page_size
        self._journal = journal
        self._groups: dict[tuple[Namespace, bytes], dict[Lease, IntArray]] = {}
        self._group_of: dict[Lease, tuple[Namespace, bytes]] = {}

    def add(self, lease: Lease, tokens: IntArray) -> None:
        """`lease` will compute and publish whole pages of `tokens`, as far as its plan is exact."""
        if len(tokens) - lease.published >= self._page_size:
            group = self._group(lease.namespace, tokens)
            members = {**self._groups.get(group, {}), lease: tokens}
            self._journal.keys(self._groups, group)
            self._journal.keys(self._group_of, lease)
            self._groups[group] = members
            self._group_of[lease] = group

    def progress(self, lease: Lease) -> None:
        """`lease` has published; it leaves once nothing of its prompt is to come."""
        group = self._group_of.get(lease)
        if group is not None and lease.published >= self._target(lease, self._groups[group][lease]):
            self.discard(lease)

    def discard(self, lease: Lease) -> None:
        """`lease` will publish nothing of its prompt any more."""
        group = self._group_of.get(lease)
        if group is None:
            return
        members = {other: at for other, at in self._groups[group].items() if other is not lease}
        self._journal.keys(self._groups, group)
        self._journal.keys(self._group_of, lease)
        del self._group_of[lease]
        if members:
            self._groups[group] = members
        else:
            del self._groups[group]

    def pending_prefix(self, view: RequestView, matched: int, limit: int) -> int:
        """Tokens of `view.tokens[:limit]` that will be published; 0 if no more than `matched`."""
        if limit <= matched:
            return 0
        best, size = matched, self._page_size
        group = self._groups.get(self._group(view.namespace, view.tokens), {})
        for lease, tokens in group.items():
            end = min(limit, self._target(lease, tokens))
            if end <= best or common_prefix(view.tokens[best : best + size], tokens[best:]) < size:
                continue  # no longer than the best so far
            best = max(best, common_prefix(view.tokens[:end], tokens) // size * size)
        return best if best > matched else 0

    def _target(self, lease: Lease, tokens: IntArray) -> int:
        return lease.plan.publishable(len(tokens)) // self._page_size * self._page_size

    def _group(self, namespace: Namespace, tokens: IntArray) -> tuple[Namespace, bytes]:
        return namespace, tokens[: self._page_size].tobytes()


class RadixLease(Lease):
    """Holds the path that ends with `node`, at position `published`; None once released.

    `pinned` are the ends of other paths that it holds as well, such as donors'.
    """

    __slots__ = ("node", "pinned")

    def __init__(self, view: RequestView, plan: Plan, pages: IntArray, node: Node) -> None:
        super().__init__(view, plan, pages)
        self.node: Node | None = node
        self.pinned: tuple[Node, ...] = ()

    def keep(self, journal: Journal) -> None:
        super().keep(journal)
        journal.fields(self, "node", "pinned")


class RadixCache(CacheBackend):
    """Every page of the tree is owned by the cache, and by each lease whose path it lies on."""

    name = "radix"

    def __init__(self, pool: PagePool, options: CacheOptions) -> None:
        super().__init__(pool, options)
        self.tree = RadixTree(
            pool.page_size,
            options.eviction,
            pool.journal,
            int(options.retention_share * pool.num_pages),
        )
        self._pending = PendingPrefixes(pool.page_size, pool.journal)
        self._events: TreeEvents | None = None
        if options.events:
            self._events = TreeEvents(pool.page_size, pool.num_pages, pool.journal)
            self.tree.observers.append(self._events)

    def match(self, view: RequestView) -> int:
        place = self.tree.find(view.namespace, view.tokens[: self._servable(view)])
        return 0 if place is None else self.tree.length(place)

    @atomic
    def lease(self, view: RequestView) -> RadixLease:
        root = self.tree.root(view.namespace)
        node = self.tree.cut(self.tree.descend(root, view.tokens[: self._servable(view)]))
        self.tree.lock(node)
        pages = self.tree.path_pages(node)
        self.pool.share(pages)
        lease = RadixLease(view, Plan(len(view.tokens), node.end), pages, node)
        self._pending.add(lease, view.tokens)
        return lease

    @atomic
    def publish(self, lease: Lease, tokens: IntArray, computed: int) -> None:
        assert isinstance(lease, RadixLease)
        begin, end = lease.published, self._shareable(lease, computed)
        if end <= begin or lease.node is None:
            return
        first, last = begin // self.page_size, end // self.page_size
        lease.keep(self._journal)
        lease.node, canonical = self.tree.extend(
            lease.node, tokens[begin:end], lease.pages[first:last]
        )
        self._converge(lease, first, canonical)
        self.pool.share(lease.pages[first + len(canonical) : last])
        lease.published = end
        self._pending.progress(lease)

    @atomic
    def release(self, lease: Lease) -> None:
        assert isinstance(lease, RadixLease)
        if lease.node is None:
            return
        lease.keep(self._journal)
        self._pending.discard(lease)
        self.tree.touch(lease.node, lease.priority)
        if lease.retain_seconds:
            self.tree.keep_longer(lease.node, lease.retain_seconds)
        for node in (*lease.pinned, lease.node):
            self.tree.unlock(node)
        for pages in lease.owned():
            self.pool.drop(pages)
        lease.node, lease.pinned = None, ()
        lease.clear()

    @atomic
    def _set_pinned(self, lease: RadixLease, nodes: Sequence[Node]) -> None:
        """Let the lease hold the paths to `nodes` beside its own, and no others."""
        lease.keep(self._journal)
        for node in nodes:
            self.tree.lock(node)
        for node in lease.pinned:
            self.tree.unlock(node)
        lease.pinned = tuple(nodes)

    def _touch(self, lease: Lease) -> None:
        assert isinstance(lease, RadixLease)
        if lease.node is not None:
            self.tree.touch(lease.node, lease.priority, hits=1)

    def eviction_key(self, priority: int) -> Key:
        return self.tree.eviction_key(priority)

    @atomic
    def evict(self, pages: int, before: Key | None = None) -> int:
        self._journal.fields(self.counters, "evicted_pages")
        freed = sum(self.pool.drop(run) for run in self.tree.evict(pages, before))
        self.counters.evicted_pages += freed
        return freed

    @atomic
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

    def pending_prefix(self, view: RequestView, matched: int) -> int:
        if not self.options.wait_for_pending:
            return 0
        return self._pending.pending_prefix(view, matched, self._servable(view))

    def continuation(self, lease: Lease, tokens: IntArray, most: int) -> IntArray:
        assert isinstance(lease, RadixLease)
        if lease.node is None:
            return tokens[:0]
        behind = tokens[lease.published :]
        place = self.tree.descend(lease.node, behind)
        matched = self.tree.length(place) - lease.published
        return self.tree.following(place, behind[matched:], most)

    def take_events(self) -> list[KVEvent]:
        return [] if self._events is None else self._events.take()

    def tree_snapshot(self, prompts: Sequence[RequestView], most: int) -> TreeSnapshot:
        return take_snapshot(self.tree, prompts, most)

    def check_structure(self) -> None:
        self.tree.check()

    def check(self, leases: Iterable[Lease]) -> None:
        leases = list(leases)
        super().check(leases)
        ends: Counter[Node] = Counter()
        for lease in leases:
            if isinstance(lease, RadixLease) and lease.node is not None:
                ends.update((lease.node, *lease.pinned))
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


HEAD_TOKENS = 48
"""First tokens of a node that are copied, for its label."""
NEXT_OUT = 32
"""Places of the eviction queue that are listed."""


def take_snapshot(tree: RadixTree, prompts: Sequence[RequestView], most: int) -> TreeSnapshot:
    """At most `most` nodes of `tree`, and which of `prompts` lie on them."""
    on_path: dict[int, list[str]] = {}
    for view in prompts:
        for order in _path(tree, view):
            on_path.setdefault(order, []).append(view.rid)
    goes = {node.order: place for place, node in enumerate(tree.next_out(NEXT_OUT), start=1)}
    nodes = tuple(
        NodeSnapshot(
            order=node.order,
            parent=None if node.parent is None else node.parent.order,
            namespace=node.namespace,
            start=node.start,
            length=len(node.tokens),
            head=node.tokens[:HEAD_TOKENS].copy(),
            locks=node.locks,
            hits=node.hits,
            idle=tree.idle(node),
            children=len(node.children),
            goes=goes.get(node.order),
            prompts=tuple(on_path.get(node.order, ())),
        )
        for node in _recent(tree, most)
    )
    return TreeSnapshot(nodes, tree.page_size, tree.cached_pages, tree.evictable_pages)


def _recent(tree: RadixTree, most: int) -> list[Node]:
    """The most recently used nodes. Using a node uses its parents, so they form a tree."""
    taken: list[Node] = []
    heap = [(-node.last_used, node.order, node) for node in tree.roots()[-most:]]
    heapq.heapify(heap)
    while heap and len(taken) < most:
        node = heapq.heappop(heap)[-1]
        taken.append(node)
        # Of very many children the newest: going through all of them would hold up the engine.
        for child in islice(reversed(node.children.values()), most):
            heapq.heappush(heap, (-child.last_used, child.order, child))
    return taken


def _path(tree: RadixTree, view: RequestView) -> list[int]:
    place = tree.find(view.namespace, view.tokens)
    if place is None:
        return []
    last = place.node if place.pages else place.node.parent
    return [node.order for node in upwards(last)]
