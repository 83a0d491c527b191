"""What eviction costs, counted in heap operations and looks at keys; and the queue by itself."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from world import World

from kvweave.prefix import eviction
from kvweave.prefix.eviction import EvictionQueue


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
            st.sampled_from(["push", "use", "hold", "free", "pop"]),
            st.integers(0, 7),
            st.integers(0, 3),
        ),
        max_size=60,
    )
)
def test_the_queue_pops_what_a_sort_would(operations: list[tuple[str, int, int]]) -> None:
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
        elif action == "pop":
            popped = queue.pop()
            candidates = [at for at in queued if at.candidate]
            assert (popped is None) == (not candidates)
            if popped is not None:
                assert popped.key == min(at.key for at in candidates)
                queued.remove(popped)
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
