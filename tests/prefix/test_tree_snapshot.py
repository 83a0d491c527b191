"""What people see of the tree: the truth, bounded, and seen without being changed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.prefix.lease import RequestView
from support.prefix_world import NS, World, tokens_of


def letters(word: str) -> list[int]:
    return [ord(letter) for letter in word]


def view(tokens: list[int], rid: str = "0") -> RequestView:
    return RequestView(rid=rid, tokens=tokens_of(tokens), namespace=NS)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12))
def test_the_first_to_go_are_those_that_go_first(prompts: list[list[int]]) -> None:
    world = World("radix", 1, num_pages=200)
    for prompt in prompts:
        world.serve(prompt)
    snapshot = world.cache.tree_snapshot([], 1000)
    assert snapshot is not None
    assert world.cache.tree_snapshot([], 1000).evictable_pages == snapshot.evictable_pages
    leaves = {node.order: node for node in snapshot.nodes if node.goes is not None}
    first = min(leaves.values(), key=lambda node: node.goes or 0)
    before = {node.order: node.length for node in snapshot.nodes}
    world.evict(1)
    after = world.cache.tree_snapshot([], 1000)
    assert after is not None
    left = {node.order: node.length for node in after.nodes}
    assert left.get(first.order, 0) == before[first.order] - 1
    world.check()


def test_nodes_know_who_reads_from_them() -> None:
    world = World("radix", 1, num_pages=100)
    world.serve(letters("abcd"))
    world.serve(letters("abxy"))
    views = [view(letters("abcd"), "1"), view(letters("abxyz"), "2"), view(letters("q"), "3")]
    snapshot = world.cache.tree_snapshot(views, 100)
    assert snapshot is not None
    found = {tuple(node.head.tolist()): node.prompts for node in snapshot.nodes if node.length}
    assert found[tuple(letters("ab"))] == ("1", "2")
    assert sorted(found.values()) == [("1",), ("1", "2"), ("2",)]


def test_of_a_large_tree_the_nodes_used_last_are_shown_with_their_parents() -> None:
    world = World("radix", 1, num_pages=2000)
    for number in range(300):
        world.serve([7, 8, number])
    snapshot = world.cache.tree_snapshot([], 10)
    assert snapshot is not None
    assert len(snapshot.nodes) == 10
    known = {node.order for node in snapshot.nodes}
    assert all(node.parent is None or node.parent in known for node in snapshot.nodes)
    assert max(node.head.tolist()[-1] for node in snapshot.nodes if node.length) == 299
    assert snapshot.cached_pages == world.cache.cached_pages > 300
    assert max(node.children for node in snapshot.nodes) == 300
