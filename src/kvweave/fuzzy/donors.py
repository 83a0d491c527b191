"""The live tree as the store of donors: from a page to its path, its tokens and its slots.

There is no second store and no snapshot. A page is a donor while the tree holds it. Observing the
tree keeps the map from pages to nodes up to date.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np

from kvweave.errors import IntegrityError
from kvweave.fuzzy.matcher import common_suffix
from kvweave.fuzzy.provider import Candidate, PublishedRun
from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Lease, RequestView, SharedSpan, Span
from kvweave.prefix.tree import Node, RadixTree, common_prefix, upwards

_CHILDREN_TRIED = 16
"""Where no child's first page is wholly equal, so many children are compared in part."""


class DonorListener(Protocol):
    """Is told which donors come and go."""

    def on_published(self, run: PublishedRun) -> None: ...

    def on_evicted(self, pages: IntArray) -> None: ...

    def clear(self) -> None: ...


class DonorTree:
    """Observes a radix tree and implements `Donors` on it."""

    def __init__(self, tree: RadixTree, num_pages: int) -> None:
        self.page_size = tree.page_size
        self.num_pages = num_pages
        self.listener: DonorListener | None = None
        self.decode: Callable[[IntArray], str] | None = None
        self.publisher = ""
        """The request that publishes right now."""
        self.prompt_end = 0
        """Up to this position, in whole pages, it will publish its prompt."""
        self.semantic = True
        """Whether it allows its meaning to be compared."""
        self.leases: set[Lease] = set()
        """Leases that are not released yet."""
        self._nodes: dict[int, Node] = {}
        """By their order, which is a unique number."""
        self._order = np.full(num_pages, -1, np.int32)
        self._depth = np.zeros(num_pages, np.int32)
        """By page: how many pages lie above it on its path."""
        self._journal = tree.journal
        tree.observers.append(self)

    @property
    def nbytes(self) -> int:
        """Memory of the map from pages to paths."""
        return self._order.nbytes + self._depth.nbytes

    @property
    def running(self) -> int:
        return len(self.leases)

    # Looking up.

    def node(self, page: int) -> Node | None:
        """The node that holds `page` now."""
        return self._nodes.get(int(self._order[page])) if 0 <= page < self.num_pages else None

    def start(self, page: int) -> int:
        return -1 if self.node(page) is None else int(self._depth[page]) * self.page_size

    def tokens(self, page: int, first: int = 0) -> IntArray:
        node = self.node(page)
        if node is None:
            return np.empty(0, np.int32)
        end = self.start(page) + self.page_size
        path = reversed(_covering(node, first))
        runs = [at.tokens[max(0, first - at.start) : end - at.start] for at in path]
        return np.concatenate(runs)

    def named(self, order: int) -> Node | None:
        """The node with this number, if it still exists."""
        return self._nodes.get(order)

    def slots(self, candidate: Candidate) -> IntArray:
        """The slots of a verified candidate's donor run, in order: int32 (length)."""
        node = self.node(candidate.page)
        assert node is not None  # verified, and the tree has not changed since
        path = _covering(node, candidate.donor_start)
        pages = np.concatenate([at.pages for at in reversed(path)])
        before = path[-1].start
        return slots_of(
            pages, self.page_size, candidate.donor_start - before, candidate.donor_end - before
        )

    # Comparing.

    def run_around(
        self, view: RequestView, position: int, page: int, donor_position: int
    ) -> Candidate | None:
        node = self.node(page)
        if node is None or node.namespace != view.namespace:
            return None
        behind = self.start(page) + self.page_size
        if not (0 <= position < len(view.tokens) and 0 <= donor_position < behind):
            return None
        while node.start > donor_position:
            assert node.parent is not None  # the root starts at 0
            node = node.parent
        before = self._backward(node, donor_position + 1, view.tokens[: position + 1])
        if not before:
            return None
        after, last = self._forward(node, donor_position + 1, view.tokens[position + 1 :])
        donor_end = donor_position + 1 + after
        return Candidate(
            start=position + 1 - before,
            length=before + after,
            page=int(last.pages[(donor_end - 1 - last.start) // self.page_size]),
            donor_start=donor_position + 1 - before,
        )

    def verified(self, view: RequestView, claim: Candidate) -> Candidate | None:
        """The whole run around `claim` if every claimed token is cached there; else None."""
        if claim.length < 1:
            return None
        run = self.run_around(view, claim.end - 1, claim.page, claim.donor_end - 1)
        return run if run is not None and run.start <= claim.start else None

    def _backward(self, node: Node, end: int, tokens: IntArray) -> int:
        """How many tokens before position `end` of the path equal the last ones of `tokens`."""
        equal = 0
        for at in upwards(node):
            run = at.tokens[: end - equal - at.start]
            same = common_suffix(run, tokens[: len(tokens) - equal])
            equal += same
            if same < len(run):
                break
        return equal

    def _forward(self, node: Node, begin: int, tokens: IntArray) -> tuple[int, Node]:
        """How many of `tokens` follow position `begin` of the path, and the node of the last one.

        The node is `node` itself if none does.
        """
        equal = common_prefix(node.tokens[begin - node.start :], tokens)
        while begin + equal == node.end and equal < len(tokens):
            child, same = self._best_child(node, tokens[equal:])
            if child is None:
                break
            node, equal = child, equal + same
        return equal, node

    def _best_child(self, node: Node, tokens: IntArray) -> tuple[Node | None, int]:
        """The child with the longest common prefix with `tokens`, and that length."""
        whole = node.children.get(tokens[: self.page_size].tobytes())
        if whole is not None:
            return whole, common_prefix(whole.tokens, tokens)
        best, length = None, 0
        newest_first = reversed(node.children.values())
        for child, _ in zip(newest_first, range(_CHILDREN_TRIED), strict=False):
            same = common_prefix(child.tokens[: self.page_size], tokens)
            if same > length:
                best, length = child, same
        return best, length

    # Observing.

    def on_store(self, node: Node, first_page: int) -> None:
        pages = node.pages[first_page:]
        depth = node.start // self.page_size + first_page
        self._journal.keys(self._nodes, node.order)
        self._journal.items(self._order, pages)
        self._nodes[node.order] = node
        self._order[pages] = node.order
        self._depth[pages] = np.arange(depth, depth + len(pages))
        if self.listener is not None:
            self._journal.after_undo(self.listener.on_evicted, read_only(pages))
            complete = node.end >= self.prompt_end
            self._publish(node, first_page, self.publisher, self.semantic, complete)

    def on_split(self, upper: Node, lower: Node) -> None:
        self._journal.keys(self._nodes, upper.order)
        self._journal.items(self._order, upper.pages)
        self._nodes[upper.order] = upper
        self._order[upper.pages] = upper.order

    def on_remove(self, node: Node, first_page: int) -> None:
        pages = node.pages[first_page:]
        self._journal.keys(self._nodes, node.order)
        self._journal.items(self._order, pages)
        self._order[pages] = -1
        if not first_page:
            del self._nodes[node.order]
        if self.listener is not None:
            self._journal.after_undo(self._publish, node, first_page)
            self.listener.on_evicted(read_only(pages))

    def on_reset(self) -> None:
        nodes = list(self._nodes.values())
        self._journal.fields(self, "_nodes")
        self._journal.items(self._order, slice(None))
        self._nodes = {}
        self._order.fill(-1)
        if self.listener is not None:
            for node in nodes:
                self._journal.after_undo(self._publish, node)
            self.listener.clear()

    def _publish(
        self,
        node: Node,
        first_page: int = 0,
        rid: str = "",
        semantic: bool = False,
        complete: bool = True,
    ) -> None:
        """Tell the listener of `node.pages[first_page:]`; by default, what is least and safe."""
        if self.listener is not None:
            self.listener.on_published(
                PublishedRun(
                    rid=rid,
                    namespace=node.namespace,
                    pages=read_only(node.pages[first_page:]),
                    start=node.start + first_page * self.page_size,
                    tokens=read_only(node.tokens[first_page * self.page_size :]),
                    semantic=semantic,
                    complete=complete,
                )
            )

    # Proving.

    def check(self, tree: RadixTree) -> None:
        """Compare the map with the tree's own pages; IntegrityError where they differ."""
        order = np.full(self.num_pages, -1, np.int32)
        for node in tree.nodes():
            depth = node.start // self.page_size
            order[node.pages] = node.order
            if not np.array_equal(
                self._depth[node.pages], np.arange(depth, depth + len(node.pages))
            ):
                raise IntegrityError(f"pages of node {node.order} are taken for others of its path")
        if not np.array_equal(order, self._order):
            page = int(np.flatnonzero(order != self._order)[0])
            raise IntegrityError(f"page {page} is not at node {self._order[page]}")


def read_only(array: IntArray) -> IntArray:
    """The same memory as a read-only array."""
    return cast(IntArray, np.asarray(array.data.toreadonly()))


def slots_of(pages: IntArray, page_size: int, begin: int, end: int) -> IntArray:
    """The slots of positions `begin` to `end`, where `pages` holds positions from 0 on: int32."""
    positions = np.arange(begin, end, dtype=np.int32)
    return pages[positions // page_size] * np.int32(page_size) + positions % np.int32(page_size)


def _covering(node: Node, first: int) -> list[Node]:
    """`node` and its ancestors, upwards, down to the one that holds position `first`."""
    path = []
    for at in upwards(node):
        path.append(at)
        if at.start <= first:
            break
    return path


def shared_run(
    span: Span, slots: IntArray, chosen: IntArray, size: int, least: int
) -> SharedSpan | None:
    """What of `span` is read in the donor's `slots`, to its end; None if too little.

    The first tokens of a span may be computed again (`chosen`), and are the lease's own. A
    session's donors are copied: they may go before it.
    """
    own = np.searchsorted(chosen, (span.start, span.end))
    start = span.start + int(own[1] - own[0])
    if span.generation or span.end - start < max(least, 1):
        return None
    read = slots[start - span.start :]
    pages = read // np.int32(size)
    distinct = pages[np.flatnonzero(np.diff(pages, prepend=-1))]
    delta = span.start - span.donor_start
    return SharedSpan(start, span.end, distinct, int(read[0]) % size, delta)


def worth_their_paths(
    runs: Sequence[SharedSpan | None], nodes: Sequence[Node | None]
) -> list[SharedSpan | None]:
    """Only runs of donors of which they read half of what they keep from eviction, or more.

    A donor's whole path stays while a part of it is read: a copy of little is then cheaper.
    """
    read: Counter[Node | None] = Counter()
    for run, node in zip(runs, nodes, strict=True):
        read[node] += 0 if run is None else run.end - run.start
    return [
        run if node is not None and 2 * read[node] >= node.end else None
        for run, node in zip(runs, nodes, strict=True)
    ]
