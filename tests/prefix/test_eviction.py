"""What goes first, what evicting costs (counted in heap operations), and the queue by itself."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.prefix import eviction
from kvweave.prefix.eviction import EvictionQueue
from support.prefix_world import NS, World, text, tokens_of


def _counting_heap(counted: dict[str, int]) -> SimpleNamespace:
    def wrap(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            counted[name] = counted.get(name, 0) + 1
            return getattr(heapq, name)(*arguments)

        return call

    return SimpleNamespace(**{name: wrap(name) for name in ("heappush", "heappop", "heapreplace")})


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "priority"])
@pytest.mark.parametrize("leaves", [50, 400])
def test_evicting_n_pages_costs_n_heap_operations_whatever_the_number_of_leaves(
    keeping: str, leaves: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(keeping, 1, num_pages=2 * leaves, eviction=policy)
    for leaf in range(leaves):
        world.serve([7, leaf])  # one shared page, and one of its own
    counted: dict[str, int] = {}
    monkeypatch.setattr(eviction, "heapq", _counting_heap(counted))
    pages = leaves // 2
    for _ in range(pages):
        assert world.cache.evict(1) == 1
    assert 0 < sum(counted.values()) <= 2 * pages


def test_serving_a_hot_prefix_again_and_again_does_not_grow_the_queue(keeping: str) -> None:
    world = World(keeping, 1, num_pages=200)
    for leaf in range(100):
        world.serve([7, leaf])
    for _ in range(300):
        world.serve([7, 3, 9])
    queue = getattr(world.cache, "tree", None) or getattr(world.cache, "index")  # noqa: B009
    assert len(queue._queue._heap) <= 103


@dataclass(eq=False)
class Thing:
    key: tuple[int, int]
    candidate: bool = True


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "use", "hold", "free", "lowest", "discard"]),
            st.integers(0, 7),
            st.integers(0, 3),
        ),
        max_size=60,
    )
)
def test_the_queue_finds_what_a_sort_would(operations: list[tuple[str, int, int]]) -> None:
    things = [Thing((0, 0)) for _ in range(8)]
    queued: set[Thing] = set()
    queue: EvictionQueue[Thing] = EvictionQueue(lambda at: at.key, lambda at: at.candidate)
    for action, index, more in operations:
        thing = things[index]
        if action == "push" or (action == "free" and not thing.candidate):
            thing.candidate = True
            queue.push(thing)
            queued.add(thing)
        elif action == "use":
            thing.key = (thing.key[0], thing.key[1] + more)
        elif action == "hold":
            thing.candidate = False
        elif action == "discard":
            queue.discard(thing)
            queued.discard(thing)
        elif action == "lowest":
            before = (0, more) if index % 2 else None
            found = queue.lowest(before)
            candidates = [at for at in queued if at.candidate]
            if before is not None:
                candidates = [at for at in candidates if at.key < before]
            assert (found is None) == (not candidates)
            if found is not None:
                assert found.key == min(at.key for at in candidates)
                assert queue.lowest(before) is found, "it stays while it is a candidate"
        for at in list(queued):
            assert at in queue or not at.candidate


def test_evicted_runs_free_exactly_what_was_asked(keeping: str) -> None:
    rng = np.random.default_rng(0)
    world = World(keeping, 2, num_pages=128)
    for _ in range(30):
        world.serve(rng.integers(0, 2, rng.integers(1, 20)).tolist())
        world.check()
    while world.cache.cached_pages:
        world.evict(int(rng.integers(1, 5)))
        world.check()


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", ["twice, then never again", "once", "never", "urgent"]),
        ("lfu", ["never", "urgent", "once", "twice, then never again"]),
        ("slru", ["never", "urgent", "twice, then never again", "once"]),
        ("priority", ["twice, then never again", "once", "never", "urgent"]),
    ],
)
def test_policies_differ_in_what_goes_first(keeping: str, policy: str, order: list[str]) -> None:
    world = World(keeping, 4, eviction=policy)
    names = sorted(order)
    prompts = {name: text(2.25, 4, seed) for seed, name in enumerate(names)}

    def use(name: str) -> None:
        world.serve(prompts[name], priority=1 if name == "urgent" else 0)

    for name in ["once", "twice, then never again", *["twice, then never again"] * 2]:
        use(name)
    for name in ["once", "never", "urgent"]:
        use(name)
    gone = []
    while world.evict(2):
        world.check()
        left = [name for name in names if name not in gone and not world.match(prompts[name])]
        gone += left
    assert gone == order


def test_priority_eviction_spares_the_higher_one_however_old(keeping: str) -> None:
    world = World(keeping, 4, eviction="priority")
    priorities = [10**20, 5, 0, -5, -(10**20)]
    for seed, priority in enumerate(priorities):
        world.serve(text(2, 4, seed), priority=priority)
    for left in range(len(priorities) - 1, -1, -1):
        world.evict(2)
        found = [world.match(text(2, 4, seed)) for seed in range(len(priorities))]
        assert found == [4] * left + [0] * (len(priorities) - left)
        world.check()


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "priority"])
def test_locked_paths_survive_any_policy(keeping: str, policy: str) -> None:
    world = World(keeping, 4, eviction=policy)
    held = world.run(text(3, 4, seed=0))
    for seed in range(1, 6):
        world.serve(text(3, 4, seed), priority=9)
    world.evict(100)
    world.check()
    assert world.cache.cached_pages == 3
    held.release()


def test_a_head_used_lately_outlives_what_was_used_in_between(keeping: str) -> None:
    world = World(keeping, 4)
    long, between = text(4, 4, seed=1), text(2, 4, seed=2)
    world.serve(long)
    world.serve(between)
    world.serve(long[: 2 * 4 + 1], fuzzy=False)
    world.evict(3)
    assert world.match(long) == 8
    assert world.match(np.append(between, np.int32(1))) == 4
    world.check()


@pytest.mark.parametrize(("policy", "priority"), [("lfu", 0), ("priority", 5)])
def test_new_pages_start_without_the_merits_of_those_before_them(
    keeping: str, policy: str, priority: int
) -> None:
    world = World(keeping, 4, num_pages=6, eviction=policy)
    for _ in range(3):
        world.serve(text(2.25, 4, seed=0), priority=priority)
    world.evict(2)  # and its pages are the next to be handed out
    world.serve(text(2, 4, seed=1))
    for _ in range(2):
        world.serve(text(2, 4, seed=2), priority=min(priority, 1))
    world.evict(2)
    assert world.match(text(2, 4, seed=1)) == 0
    assert world.match(text(2, 4, seed=2)) == 4


def test_a_shared_head_outlives_the_branches_that_hang_on_it(keeping: str) -> None:
    world = World(keeping, 4)
    head = text(2, 4)
    branches = [np.concatenate([head, text(2, 4, seed)]) for seed in range(1, 5)]
    for branch in branches:
        world.serve(branch)
    left = [world.cache.cached_pages]
    while world.evict(1):
        world.check()
        left.append(world.cache.cached_pages)
        if left[-1] >= 2:
            assert world.match(branches[-1]) >= 8
    assert all(before - after == 1 for before, after in pairwise(left))
    assert world.match(tokens_of(head), NS) == 0
