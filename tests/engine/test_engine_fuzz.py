"""Random lives of an engine: adds, aborts, faults, a pool that is too small; checked all along."""

from __future__ import annotations

import numpy as np
import pytest

from support.enginekit import (
    EXACT_BACKENDS,
    Faults,
    World,
    assert_answers,
    make_world,
    random_life,
)


def random_world(rng: np.random.Generator, backend: str) -> World:
    page_size = int(rng.choice([1, 4, 16]))
    return make_world(
        backend,
        page_size=page_size,
        pool_tokens=int(rng.choice([160, 256, 640])),
        eviction=str(rng.choice(["lru", "lfu", "slru", "priority"])),
        chunked_prefill_size=int(rng.choice([1, 7, 32, 256])),
        max_running_requests=int(rng.choice([1, 3, 8])),
        schedule_policy=str(rng.choice(["fcfs", "lpm"])),
        max_queued_requests=12,
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_random_lives_end_idle_and_answer_right(backend, seed):
    rng = np.random.default_rng([seed, len(backend)])
    for life in range(3):
        world = random_world(rng, backend)
        faults = rng.random() < 0.3
        world.runner.before = Faults(rng, 0.1 if faults else 0.0)
        requests = random_life(world, rng, 60, label=f"{life}-")
        assert_answers(world, requests, faults)
        world.engine.flush_cache()
        assert world.engine.snapshot().free_tokens == world.engine.snapshot().total_tokens
