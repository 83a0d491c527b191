"""Nodes of the radix tree, and the token and page runs that they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvweave.kv.pool import IntArray
from kvweave.prefix.eviction import LOWEST
from kvweave.prefix.lease import Namespace


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
