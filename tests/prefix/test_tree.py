"""The radix tree by itself: its shape, and the calls of its observers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import IntegrityError
from kvweave.prefix.tree import Node, RadixTree, common_prefix, grown, shrunk
from support.prefix_world import NS, tokens_of


class Census:
    """Keeps book of pages by what an observer is told: page to (node, index in the node)."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[Node, int]] = {}

    def on_store(self, node: Node, first_page: int) -> None:
        for at, page in enumerate(node.pages.tolist()[first_page:], first_page):
            assert page not in self.pages
            self.pages[page] = (node, at)

    def on_split(self, upper: Node, lower: Node) -> None:
        assert lower.parent is upper
        for node in (upper, lower):
            self.pages.update({page: (node, at) for at, page in enumerate(node.pages.tolist())})

    def on_remove(self, node: Node, first_page: int) -> None:
        for page in node.pages.tolist()[first_page:]:
            del self.pages[page]

    def on_reset(self) -> None:
        self.pages.clear()

    def check(self, tree: RadixTree) -> None:
        actual = {
            page: (node, at) for node in tree.nodes() for at, page in enumerate(node.pages.tolist())
        }
        assert self.pages == actual


class Grower:
    """Puts texts into a tree, each page under a new number."""

    def __init__(self, page_size: int) -> None:
        self.tree = RadixTree(page_size)
        self.census = Census()
        self.tree.observers.append(self.census)
        self.next_page = 0

    def hold(self, *tokens: int) -> Node:
        """Insert, and stay on the path."""
        root = self.tree.root(NS)
        self.tree.lock(root)
        return self.extend(root, *tokens)

    def extend(self, node: Node, *tokens: int) -> Node:
        count = len(tokens) // self.tree.page_size
        pages = tokens_of(range(self.next_page, self.next_page + count))
        self.next_page += count
        node, known = self.tree.extend(node, tokens_of(tokens), pages)
        assert self.tree.path_pages(node).tolist()[-count:] == [*known, *pages[len(known) :]]
        self.check()
        return node

    def check(self) -> None:
        self.tree.check()
        self.census.check(self.tree)

    def shape(self) -> list[list[int]]:
        return sorted(node.tokens.tolist() for node in self.tree.nodes() if len(node.tokens))


def test_a_run_that_one_request_decodes_is_one_node() -> None:
    grower = Grower(2)
    node = grower.hold(1, 2)
    for token in range(3, 21, 2):
        assert grower.extend(node, token, token + 1) is node
    assert grower.shape() == [list(range(1, 21))]


def test_a_run_that_someone_else_holds_or_hit_does_not_grow() -> None:
    grower = Grower(1)
    node = grower.hold(1, 2)
    grower.tree.lock(node)
    assert grower.extend(node, 3) is not node
    grower = Grower(1)
    node = grower.hold(1, 2)
    grower.tree.touch(node, hits=1)
    assert grower.extend(node, 3).hits == 0
    assert grower.shape() == [[1, 2], [3]]


def test_a_split_happens_only_where_paths_part_or_end() -> None:
    grower = Grower(1)
    grower.hold(1, 2, 3, 4)
    grower.hold(1, 2, 5)
    assert grower.shape() == [[1, 2], [3, 4], [5]]
    place = grower.tree.find(NS, tokens_of([1, 2, 3]))
    assert place is not None
    assert grower.tree.length(place) == 3
    assert grower.shape() == [[1, 2], [3, 4], [5]], "looking up changes nothing"
    assert grower.tree.cut(place).end == 3
    grower.check()
    assert grower.shape() == [[1, 2], [3], [4], [5]]


def test_both_parts_of_a_split_were_used_as_the_whole_was() -> None:
    grower = Grower(1)
    lower = grower.hold(1, 2, 3, 4)
    grower.tree.touch(lower, priority=3, hits=2)
    place = grower.tree.find(NS, tokens_of([1, 2]))
    assert place is not None
    upper = grower.tree.cut(place)
    assert upper is not lower
    for name in ("locks", "hits", "priority", "last_used"):
        assert getattr(upper, name) == getattr(lower, name) > 0


def test_a_partial_page_makes_no_node() -> None:
    grower = Grower(4)
    node = grower.hold(1, 2, 3, 4, 5, 6, 7, 8)
    place = grower.tree.find(NS, tokens_of([1, 2, 3, 9, 9]))
    assert place is not None
    assert grower.tree.length(place) == 0
    place = grower.tree.find(NS, tokens_of([1, 2, 3, 4, 5, 6]))
    assert place == (node, 1)


def test_a_lock_covers_the_node_itself_and_all_above() -> None:
    grower = Grower(1)
    upper = grower.hold(1, 2)
    grower.tree.lock(upper)
    lower = grower.extend(upper, 3)
    assert upper is not lower
    grower.tree.unlock(upper)
    assert grower.tree.evict(10) == []
    with pytest.raises(IntegrityError):
        grower.tree.trim(lower, 0)
    grower.tree.unlock(lower)
    with pytest.raises(IntegrityError):
        grower.tree.trim(upper, 0)
    assert [run.tolist() for run in grower.tree.evict(10)] == [[2], [0, 1]]
    grower.check()
    with pytest.raises(IntegrityError):
        grower.tree.unlock(lower)


def test_an_empty_namespace_leaves_no_root_behind() -> None:
    grower = Grower(1)
    grower.tree.unlock(grower.hold(1, 2, 3))
    grower.tree.evict(2)
    assert grower.tree.find(NS, tokens_of([1])) is not None
    grower.tree.evict(1)
    assert grower.tree.find(NS, tokens_of([1])) is None
    grower.tree.unlock(grower.hold())
    assert grower.tree.find(NS, tokens_of([1])) is None
    assert list(grower.tree.nodes()) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree, node: setattr(tree, "cached_pages", 9),
        lambda tree, node: setattr(tree, "evictable_pages", 1),
        lambda tree, node: setattr(node, "locks", 5),
        lambda tree, node: setattr(node, "parent", None),
        lambda tree, node: setattr(node, "start", 1),
        lambda tree, node: setattr(node, "tokens", node.tokens[:0]),
        lambda tree, node: setattr(node, "tokens", node.tokens + 1),
        lambda tree, node: (tree.unlock(node), tree._queue.discard(node)),
    ],
)
def test_check_finds_what_is_wrong(damage: Callable[[RadixTree, Node], object]) -> None:
    grower = Grower(1)
    node = grower.hold(1, 2)
    damage(grower.tree, node)
    with pytest.raises(IntegrityError):
        grower.tree.check()


runs = st.lists(st.integers(0, 2), max_size=12)


@given(st.lists(st.tuples(runs, st.booleans()), max_size=12), st.integers(1, 3))
def test_a_tree_finds_the_longest_prefix_of_what_was_put_in(
    texts: list[tuple[list[int], bool]], page_size: int
) -> None:
    grower = Grower(page_size)
    known: set[tuple[int, ...]] = set()
    for text, stays in texts:
        whole = text[: len(text) // page_size * page_size]
        node = grower.hold(*whole)
        known |= {tuple(whole[:end]) for end in range(0, len(whole) + 1, page_size)}
        assert node.end == len(whole)
        if not stays:
            grower.tree.unlock(node)
            grower.check()
    for text, _ in texts:
        text = [*text[::-1], 1]
        place = grower.tree.find(NS, tokens_of(text))
        length = 0 if place is None else grower.tree.length(place)
        expected = 0
        while tuple(text[: expected + page_size]) in known and expected + page_size <= len(text):
            expected += page_size
        assert length == expected


@given(runs, runs)
def test_common_prefix(a: list[int], b: list[int]) -> None:
    same = common_prefix(tokens_of(a), tokens_of(b))
    assert a[:same] == b[:same]
    assert same == min(len(a), len(b)) or a[same] != b[same]


@given(st.lists(st.tuples(runs, st.integers(0, 20)), max_size=20))
def test_a_run_grows_and_shrinks_in_place(changes: list[tuple[list[int], int]]) -> None:
    run, expected = tokens_of([]), []
    for more, keep in changes:
        run, expected = grown(run, tokens_of(more)), expected + more
        run, expected = shrunk(run, min(keep, len(run))), expected[:keep]
        assert run.tolist() == expected
        memory = run if run.base is None else run.base
        assert len(memory) <= 4 * max(len(run), 1) or len(run) == 0


def test_appending_to_a_run_seldom_copies_it() -> None:
    run, copies = tokens_of([]), 0
    for token in range(4_096):
        longer = grown(run, tokens_of([token]))
        copies += not np.shares_memory(longer, run)
        run = longer
    assert run.tolist() == list(range(4_096))
    assert copies <= 15
