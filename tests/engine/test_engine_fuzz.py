"""Random lives of an engine: adds, aborts, faults, a pool that is too small; checked all along."""

from __future__ import annotations

import numpy as np
import pytest

from kvweave.errors import RequestError
from support.enginekit import EXACT_BACKENDS, World, make_world, oracle_answer, prompt, request

FAMILIES = [prompt(90, seed) for seed in range(4)]


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


def random_request(rng: np.random.Generator, rid: str):
    family = FAMILIES[rng.integers(len(FAMILIES))]
    shared = family[: int(rng.integers(0, len(family)))]
    tokens = prompt(len(shared) + int(rng.integers(1, 12)), int(rng.integers(1000)), shared)
    sampling = {}
    if rng.random() < 0.2:
        sampling["prompt_logprobs"] = int(rng.integers(0, 3))
    if rng.random() < 0.2:
        sampling["n"] = int(rng.integers(2, 4))
    return request(
        rid,
        tokens,
        int(rng.choice([0, 1, 3, 20, 60, 200])),
        priority=int(rng.choice([0, 0, 0, 1, -1])),
        salt=str(rng.choice(["", "a"])) if rng.random() < 0.2 else None,
        **sampling,
    )


class Faults:
    """Breaks a forward pass now and then; never so often that the engine gives up."""

    def __init__(self, rng: np.random.Generator, rate: float) -> None:
        self.rng, self.rate, self.row = rng, rate, 0

    def __call__(self, batch) -> None:
        self.row = self.row + 1 if self.rng.random() < self.rate else 0
        if 0 < self.row < 4:
            raise RuntimeError("injected")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_random_lives_end_idle_and_answer_right(backend, seed):
    rng = np.random.default_rng([seed, len(backend)])
    for life in range(3):
        world = random_world(rng, backend)
        faults = rng.random() < 0.3
        world.runner.before = Faults(rng, 0.1 if faults else 0.0)
        requests = {}
        for turn in range(60):
            for _ in range(int(rng.integers(0, 3))):
                new = random_request(rng, f"{life}-{turn}-{len(requests)}")
                try:
                    world.engine.add(new)
                    requests[new.rid] = new
                except RequestError:
                    world.engine.check()
            if requests and rng.random() < 0.1:
                rid = str(rng.choice(list(requests)))
                for delta in world.engine.abort(rid):
                    world.answers[delta.rid, delta.index].finish_reason = delta.finish_reason
                world.engine.check()
            world.step()
        world.runner.before = lambda batch: None
        world.run()
        world.assert_idle()
        assert_answers(world, requests, faults)
        world.engine.flush_cache()
        assert world.engine.snapshot().free_tokens == world.engine.snapshot().total_tokens


def assert_answers(world: World, requests, faults: bool) -> None:
    assert {rid for rid, _ in world.answers} == set(requests)
    done = 0
    for (rid, index), answer in world.answers.items():
        asked = requests[rid]
        assert index < asked.sampling.n
        assert 0 <= answer.usage.cached_tokens < len(asked.prompt_ids)
        assert answer.finish_reason in ("length", "abort", "error")
        if answer.finish_reason == "error":
            assert faults
            assert "injected" in answer.error
        else:
            expected = oracle_answer(asked.prompt_ids, len(answer.token_ids))
            assert answer.token_ids == expected, (rid, index)
        if answer.finish_reason == "length":
            done += 1
            room = world.engine.limits.longest(asked) - len(asked.prompt_ids)
            assert len(answer.token_ids) == room
            if asked.sampling.prompt_logprobs is not None and index == 0:
                assert len(answer.prompt_logprobs) == len(asked.prompt_ids)
    assert done > len(world.answers) / 6
