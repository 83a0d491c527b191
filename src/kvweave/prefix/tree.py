"""A compressed radix tree over whole pages of tokens, and its nodes.

A path from a root spells a prefix whose KV is cached. The tree records pages, locks and eviction
order. It owns no pages: its cache does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from kvweave.errors import IntegrityError
from kvweave.kv.journal import Journal
from kvweave.kv.pool import IntArray
from kvweave.prefix.eviction import LOWEST, RANKS, EvictionQueue, Key, Retention
from kvweave.prefix.lease import Namespace

_CHILDREN_TRIED = 64
"""Ways on from a node that `following` compares."""


class Node:
    """A run of pages: `tokens` (len(pages) * page_size) and `pages`, from position `start` on.

    Both arrays may be replaced, and their memory reused behind their end, by the next change of the
    tree: read them when needed, keep neither. A root has no pages and no parent.
    """

    __slots__ = (
        "children",
        "hits",
        "last_used",
        "locks",
        "namespace",
        "order",
        "pages",
        "parent",
        "priority",
        "start",
        "tokens",
    )

    def __init__(
        self,
        namespace: Namespace,
        parent: Node | None,
        tokens: IntArray,
        pages: IntArray,
        order: int,
    ) -> None:
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        """By the bytes of the first page of the child's tokens."""
        self.start = 0 if parent is None else parent.end
        self.locks = 0
        """Holders of this node or of anything below it."""
        self.hits = 0
        self.priority = LOWEST
        self.last_used = 0
        self.order = order
        """Of creation; a number that names this node to people."""

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.tokens)


class Place(NamedTuple):
    """A point on a path: behind the first `pages` pages of `node`, and of everything above it."""

    node: Node
    pages: int


def common_prefix(a: IntArray, b: IntArray) -> int:
    """How many leading tokens are equal."""
    length = min(len(a), len(b))
    if not length:
        return 0
    differ = a[:length] != b[:length]
    first = int(differ.argmax())
    return first if differ[first] else length


def upwards(node: Node | None, until: Node | None = None) -> Iterator[Node]:
    """`node`, its parent and so on, to the root or to below `until`."""
    while node is not until and node is not None:
        yield node
        node = node.parent


def grown(run: IntArray, more: IntArray) -> IntArray:
    """`run` and `more`, in the memory of `run` where that suffices.

    So appending costs, on average, what is appended.
    """
    memory: IntArray = run if run.base is None else run.base
    length = len(run) + len(more)
    if len(memory) < length:
        memory = np.empty(2 * length, np.int32)
        memory[: len(run)] = run
    memory[len(run) : length] = more
    return memory[:length]


def shrunk(run: IntArray, length: int) -> IntArray:
    """The head of `run`, which lets go of its memory when most of that is unused."""
    memory = run if run.base is None else run.base
    return run[:length] if 4 * length > len(memory) else run[:length].copy()


class TreeObserver(Protocol):
    """Receives pages as they come, change nodes and go. Must not change the tree."""

    def on_store(self, node: Node, first_page: int) -> None:
        """`node.pages[first_page:]` are new."""

    def on_split(self, upper: Node, lower: Node) -> None:
        """`lower` gave its head to `upper`, a new node and now its parent."""

    def on_remove(self, node: Node, first_page: int) -> None:
        """`node.pages[first_page:]` are about to leave; with 0, so is the node."""

    def on_reset(self) -> None:
        """Everything is gone."""


class RadixTree:
    """Token runs to pages, one root per namespace. Tokens and pages are int32 arrays.

    A holder of a path locks its last node, which locks everything above. Unlocked leaves are
    evicted page by page, from the tail. Every change is entered in `journal` before it is made.
    """

    def __init__(
        self,
        page_size: int,
        eviction: str = "lru",
        journal: Journal | None = None,
        retained_pages: int = 0,
    ) -> None:
        self.page_size = page_size
        self.journal = Journal() if journal is None else journal
        self.observers: list[TreeObserver] = []
        self.cached_pages = 0
        self.evictable_pages = 0
        """Pages of unlocked nodes; below one of these, all nodes are unlocked."""
        self._roots: dict[Namespace, Node] = {}
        self._rank = RANKS[eviction]
        self._queue: EvictionQueue[Node] = EvictionQueue(self._key, _is_evictable)
        self._retention: Retention[Node] = Retention(
            self.journal, retained_pages, lambda node: len(node.pages), self._requeue
        )
        self._clock = 0
        self._created = 0

    # Looking up: nothing here changes anything.

    def find(self, namespace: Namespace, tokens: IntArray) -> Place | None:
        """The longest cached prefix of `tokens` in whole pages; None if the namespace is empty."""
        root = self._roots.get(namespace)
        return None if root is None else self.descend(root, tokens)

    def descend(self, node: Node, tokens: IntArray) -> Place:
        """Follow `tokens` from the end of `node` on, for as long as whole pages agree."""
        size, at = self.page_size, 0
        place = Place(node, len(node.pages))
        while at + size <= len(tokens):
            child = node.children.get(tokens[at : at + size].tobytes())
            if child is None:
                break
            same = common_prefix(child.tokens, tokens[at:]) // size
            place = Place(child, same)
            if same < len(child.pages):
                break
            node, at = child, at + same * size
        return place

    def following(self, place: Place, tokens: IntArray, most: int) -> IntArray:
        """A copy of up to `most` tokens that stand behind `place` and then `tokens`, fewer than a
        page; where paths part, of the newest one."""
        node, pages = place
        run = node.tokens[pages * self.page_size :]
        if not len(run):
            newest_first = islice(reversed(node.children.values()), _CHILDREN_TRIED)
            fitting = (each for each in newest_first if _begins(each.tokens, tokens))
            child = next(fitting, None)
            if child is None:
                return tokens[:0]
            node, run = child, child.tokens
        elif not _begins(run, tokens):
            return tokens[:0]
        found = [run[len(tokens) : len(tokens) + most]]
        missing = most - len(found[0])
        while missing > 0 and node.children:
            node = next(reversed(node.children.values()))
            found.append(node.tokens[:missing])
            missing -= len(found[-1])
        return np.concatenate(found)

    def length(self, place: Place) -> int:
        """Tokens from the root to `place`."""
        return place.node.start + place.pages * self.page_size

    def path_pages(self, node: Node) -> IntArray:
        """All pages from the root to the end of `node`."""
        runs = [at.pages for at in upwards(node)]
        return np.concatenate(runs[::-1])

    def roots(self) -> list[Node]:
        """One per namespace, oldest first."""
        return list(self._roots.values())

    def next_out(self, count: int) -> list[Node]:
        """The leaves that `evict` would take first, in its order."""
        return self._queue.first(count)

    def idle(self, node: Node) -> int:
        """How many paths were used since `node` was."""
        return self._clock - node.last_used

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # Holding.

    def root(self, namespace: Namespace) -> Node:
        """The namespace's root, made if need be; it lasts while it is locked or has children."""
        root = self._roots.get(namespace)
        if root is None:
            none = np.empty(0, np.int32)
            root = Node(namespace, None, none, none, self._next_order())
            self.journal.keys(self._roots, namespace)
            self._roots[namespace] = root
        return root

    def cut(self, place: Place) -> Node:
        """The node that ends exactly at `place`; splits one only where it has to.

        The lower part keeps its identity, so its holders are not affected.
        """
        lower, pages = place
        if pages == len(lower.pages):
            return lower
        parent, tokens = lower.parent, pages * self.page_size
        assert parent is not None  # roots have no pages to split
        upper = Node(
            lower.namespace,
            parent,
            lower.tokens[:tokens].copy(),
            lower.pages[:pages].copy(),
            self._next_order(),
        )
        upper.locks, upper.hits = lower.locks, lower.hits
        upper.priority, upper.last_used = lower.priority, lower.last_used
        edge = self._edge(upper)
        self.journal.keys(parent.children, edge)
        self.journal.fields(lower, "parent", "start", "tokens", "pages")
        parent.children[edge] = upper
        lower.parent, lower.start = upper, upper.end
        lower.tokens, lower.pages = lower.tokens[tokens:].copy(), lower.pages[pages:].copy()
        upper.children[self._edge(lower)] = lower
        self._retention.split(lower, upper)
        for observer in self.observers:
            observer.on_split(upper, lower)
        return upper

    def lock(self, node: Node) -> None:
        """Keep `node` and everything above it, all their pages, until `unlock`."""
        self._lock(upwards(node))

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of `node`."""
        if node.locks < 1:
            raise IntegrityError("a path was unlocked that nobody holds")
        self.journal.fields(self, "evictable_pages")
        for at in upwards(node):
            self.journal.fields(at, "locks")
            at.locks -= 1
            if not at.locks:
                self.evictable_pages += len(at.pages)
        self._tidy(node)

    def touch(self, node: Node, priority: int = LOWEST, hits: int = 0) -> None:
        """The path to `node` is used now, and was hit `hits` times.

        Locked nodes are not evicted: a call before `unlock` is enough.
        """
        self.journal.fields(self, "_clock")
        self._clock += 1
        for at in upwards(node):
            self.journal.fields(at, "last_used", "priority", "hits")
            at.last_used = self._clock
            at.priority = max(at.priority, priority)
            at.hits += hits

    def keep_longer(self, node: Node, seconds: float) -> None:
        """Evict the path to `node`, which is locked, after what is not retained, for this long.

        A path longer than may be retained is retained from its beginning on.
        """
        room, held = self._retention.most_pages, []
        for at in list(upwards(node))[::-1]:
            if len(at.pages) > room:
                if room:
                    held.append(self.cut(Place(at, room)))
                break
            if len(at.pages):
                held.append(at)
            room -= len(at.pages)
        self._retention.hold(reversed(held), seconds)

    def eviction_key(self, priority: int) -> Key:
        """The key of an entry that a request of `priority` would add now: never hit."""
        return self._rank(0, priority), self._clock + 1

    # Changing.

    def extend(self, node: Node, tokens: IntArray, pages: IntArray) -> tuple[Node, IntArray]:
        """Continue the path to `node` by `tokens`, whose KV is in `pages`.

        The caller has locked `node`; the lock moves to the node returned, where the longer path
        ends. Where the tree has a head of these tokens already, it stays as it is: its pages come
        back too, and that many at the head of `pages` were not taken.
        """
        place = self.descend(node, tokens)
        last = self.cut(place)
        known = (last.end - node.end) // self.page_size
        walked = list(upwards(last, until=node))
        self._lock(walked)  # it begins below a locked node, so what is above is locked already
        runs = [at.pages for at in reversed(walked)]
        held = np.concatenate(runs) if runs else np.empty(0, np.int32)
        if known < len(pages):
            last = self._append(last, tokens[known * self.page_size :], pages[known:])
        return last, held

    def trim(self, node: Node, keep: int) -> None:
        """Forget all but the first `keep` pages of `node`, an unlocked leaf."""
        if not _is_evictable(node):
            raise IntegrityError("pages were taken from a path that is held or goes on")
        for observer in self.observers:
            observer.on_remove(node, keep)
        lost = len(node.pages) - keep
        self.journal.fields(self, "cached_pages", "evictable_pages")
        self.journal.fields(node, "tokens", "pages")
        self.cached_pages -= lost
        self.evictable_pages -= lost
        if keep:
            node.tokens = shrunk(node.tokens, keep * self.page_size)
            node.pages = shrunk(node.pages, keep)
            self._tidy(node)
            return
        parent = node.parent
        assert parent is not None  # a root has no pages and is never evictable
        edge = self._edge(node)
        self.journal.keys(parent.children, edge)
        del parent.children[edge]
        self._retention.drop([node])
        node.pages = node.pages[:0]  # no candidate for eviction any more
        self._tidy(parent)

    def evict(self, pages: int, before: Key | None = None) -> list[IntArray]:
        """Forget `pages` pages, or all that are unlocked and go before `before`; returns which."""
        gone: list[IntArray] = []
        self._retention.expire()
        while pages > 0 and (leaf := self._queue.lowest(before)) is not None:
            self.journal.on_undo(self._queue.push, leaf)
            keep = max(0, len(leaf.pages) - pages)
            gone.append(leaf.pages[keep:].copy())
            pages -= len(gone[-1])
            self.trim(leaf, keep)
        return gone

    def reset(self) -> None:
        """Forget everything; IntegrityError if anything is locked."""
        if any(root.locks for root in self._roots.values()):
            raise IntegrityError("the cache cannot be cleared while requests hold parts of it")
        self.journal.fields(self, "_roots", "_queue", "cached_pages", "evictable_pages")
        self._roots = {}
        self._queue = EvictionQueue(self._key, _is_evictable)
        self._retention.clear()
        self.cached_pages = self.evictable_pages = 0
        for observer in self.observers:
            observer.on_reset()

    def _lock(self, path: Iterable[Node]) -> None:
        """Add a holder to each node of `path`."""
        self.journal.fields(self, "evictable_pages")
        for at in path:
            self.journal.fields(at, "locks")
            if not at.locks:
                self.evictable_pages -= len(at.pages)
            at.locks += 1

    def _append(self, node: Node, tokens: IntArray, pages: IntArray) -> Node:
        """Put new pages behind `node`, which the caller has locked; no child begins like them."""
        first = 0
        if node.locks == 1 and not node.children and not node.hits and node.parent is not None:
            # No other path ends here, and it was never hit: the run grows, as it does in decoding.
            first = len(node.pages)
            self.journal.fields(node, "tokens", "pages")
            node.tokens = grown(node.tokens, tokens)
            node.pages = grown(node.pages, pages)
        else:
            parent = node
            node = Node(parent.namespace, parent, tokens.copy(), pages.copy(), self._next_order())
            node.locks = 1
            edge = self._edge(node)
            self.journal.keys(parent.children, edge)
            parent.children[edge] = node
        self.journal.fields(self, "cached_pages")
        self.cached_pages += len(pages)
        for observer in self.observers:
            observer.on_store(node, first)
        return node

    def _tidy(self, node: Node) -> None:
        """Queue `node` for eviction if it is an unlocked leaf; drop it if it is an unused root."""
        if _is_evictable(node):
            self._queue.push(node)
        elif node.parent is None and not node.locks and not node.children:
            self.journal.keys(self._roots, node.namespace)
            del self._roots[node.namespace]

    def _edge(self, node: Node) -> bytes:
        return node.tokens[: self.page_size].tobytes()

    def _key(self, node: Node) -> Key:
        rank = self._rank(node.hits, node.priority) + self._retention.rank(node)
        return rank, node.last_used

    def _requeue(self, node: Node) -> None:
        """The node's key has become smaller."""
        self._queue.discard(node)
        if _is_evictable(node):
            self._queue.push(node)

    def _next_order(self) -> int:
        self.journal.fields(self, "_created")
        self._created += 1
        return self._created

    # Proving.

    def check(self) -> None:
        """Recompute sums and links from scratch; IntegrityError where they differ."""
        cached = evictable = 0
        for node in self.nodes():
            self._check_node(node)
            cached += len(node.pages)
            evictable += 0 if node.locks else len(node.pages)
        if (cached, evictable) != (self.cached_pages, self.evictable_pages):
            raise IntegrityError(
                f"the tree counted {self.cached_pages} pages, {self.evictable_pages} evictable, "
                f"but has {cached} and {evictable}"
            )

    def _check_node(self, node: Node) -> None:
        problems = {
            "lengths of its runs": len(node.tokens) != len(node.pages) * self.page_size,
            "emptiness": (len(node.pages) == 0) != (node.parent is None),
            "locks": node.locks < sum(child.locks for child in node.children.values()),
            "children": any(
                child.parent is not node or child.start != node.end or self._edge(child) != edge
                for edge, child in node.children.items()
            ),
            "place in the queue": _is_evictable(node) and node not in self._queue,
        }
        wrong = [name for name, is_wrong in problems.items() if is_wrong]
        if wrong:
            raise IntegrityError(f"node {node.order} is wrong in {', '.join(wrong)}")


def _begins(run: IntArray, tokens: IntArray) -> bool:
    return np.array_equal(run[: len(tokens)], tokens)


def _is_evictable(node: Node) -> bool:
    return not node.locks and not node.children and len(node.pages) > 0
