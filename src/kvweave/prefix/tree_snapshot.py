"""A snapshot of the radix tree for people: nodes, the prompts on them, the eviction order.

It is taken between two steps of the engine. Its cost is bounded, however large the tree is.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Namespace, RequestView
from kvweave.prefix.tree import Node, RadixTree, upwards

HEAD_TOKENS = 48
"""First tokens of a node that are copied, for its label."""
NEXT_OUT = 32
"""Places of the eviction queue that are listed."""


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node: `length` tokens from position `start` on. A root has none, and no parent."""

    order: int
    """Its number, as plans name donors."""
    parent: int | None
    namespace: Namespace
    start: int
    length: int
    head: IntArray
    locks: int
    hits: int
    idle: int
    """How many paths were used since this one was."""
    children: int
    """How many it has, shown or not."""
    goes: int | None
    """Its place in the queue for eviction, 1 first; None if far behind, or not to be evicted."""
    prompts: tuple[str, ...]
    """Request ids of those asked about that read from it, oldest first."""


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """Nodes, parents before children, the most recently used first; and sums over all nodes."""

    nodes: tuple[NodeSnapshot, ...]
    page_size: int
    cached_pages: int
    evictable_pages: int


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
