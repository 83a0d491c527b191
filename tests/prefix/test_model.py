"""Random operations against the naive model: each one checked, on every backend."""

from __future__ import annotations

import numpy as np
import pytest

from support.prefix_world import Chaos, Mirror, World

SEEDS = range(9)
OPERATIONS = 2_000
POLICIES = ("lru", "lfu", "slru", "priority")


@pytest.mark.parametrize("seed", SEEDS)
def test_random_operations_keep_every_page_what_it_should_be(backend: str, seed: int) -> None:
    page_size = (1, 16, 128)[seed % 3]
    policy = POLICIES[seed % len(POLICIES)]
    world = World(backend, page_size, num_pages=12, eviction=policy, events=True)
    chaos, mirror = Chaos(world, np.random.default_rng(seed)), Mirror()
    for _ in range(OPERATIONS):
        chaos.step()
        mirror.follow(world.cache.take_events())
        assert len(mirror.blocks) == len(world.cached)
    resident = sorted((ns.salt or "", prefix) for ns, prefix in world.cached)
    assert sorted((salt or "", prefix) for salt, prefix in mirror.prefixes()) == resident
    while world.live:
        chaos.finish(world.live[0])
    world.check()
    world.evict(world.pool.num_pages)
    assert world.pool.num_free == world.pool.num_pages
    if world.keeps:
        assert min(chaos.happened["hit"], 5 * chaos.happened["preempt"]) > 50, chaos.happened
        assert world.cache.stats().evicted_pages > 100
        assert world.cache.stats().converged_pages > 0
