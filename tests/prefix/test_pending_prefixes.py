"""Pending prefixes: a request waits while another one computes its prefix."""

from __future__ import annotations

import numpy as np
import pytest

from kvweave.plugins import BACKENDS
from kvweave.prefix.lease import Namespace, Plan, Span
from support.prefix_world import NS, World, tokens_of

SIZE = 4
PROMPT = np.random.default_rng(0).integers(0, 50_000, 5 * SIZE).astype(np.int32)


@pytest.fixture(params=[name for name in BACKENDS if name not in ("none", "hash")])
def world(request: pytest.FixtureRequest) -> World:
    """Of a backend that shares a prefix while it is still being computed."""
    return World(str(request.param), SIZE)


def pending(world: World, prompt: np.ndarray, namespace: Namespace = NS) -> int:
    view = world.view(prompt, namespace)
    return world.cache.pending_prefix(view, world.cache.match(view))


def test_the_prefix_shared_with_a_running_request_is_pending(world: World) -> None:
    world.start(PROMPT)
    shared = np.concatenate([PROMPT[: 3 * SIZE + 1], tokens_of([1] * 9)])
    assert pending(world, shared) == 3 * SIZE
    assert pending(world, PROMPT) == 4 * SIZE, "its last token is its own to compute"
    assert pending(world, np.append(PROMPT, np.int32(1))) == 5 * SIZE


def test_a_prefix_is_pending_until_its_last_page_is_published(world: World) -> None:
    running = world.start(PROMPT)
    for _ in range(4):
        assert pending(world, PROMPT) == 4 * SIZE
        running.compute(SIZE)
    assert pending(world, PROMPT) == 0
    assert world.match(PROMPT) == 4 * SIZE


def test_when_the_computing_request_dies_the_next_takes_over(world: World) -> None:
    first = world.start(PROMPT)
    first.compute(SIZE)
    first.release()
    assert pending(world, PROMPT) == 0, "the next computes"
    second = world.start(PROMPT)
    assert second.lease.plan.exact == SIZE
    assert pending(world, PROMPT) == 4 * SIZE, "and the one after it waits"


def test_the_longest_of_several_pending_prefixes_counts(world: World) -> None:
    for pages in (1, 3, 2):
        world.start(np.concatenate([PROMPT[: pages * SIZE], tokens_of([pages] * SIZE)]))
    assert pending(world, PROMPT) == 3 * SIZE


def test_nothing_is_pending_in_another_namespace(world: World) -> None:
    world.start(PROMPT)
    assert pending(world, PROMPT, Namespace("model", salt="other")) == 0


def test_approximate_kv_is_never_pending(world: World) -> None:
    client = world.start(PROMPT)
    client.lease.plan = Plan(len(PROMPT), spans=(Span(2 * SIZE + 1, SIZE, 1, 0),))
    assert pending(world, PROMPT) == 2 * SIZE
    client.compute(3 * SIZE)
    assert pending(world, PROMPT) == 0


def test_less_than_a_page_is_not_pending(world: World) -> None:
    world.start(PROMPT[: SIZE - 1])
    world.start(PROMPT[:0])
    assert pending(world, PROMPT) == 0
    world.start(PROMPT)
    assert pending(world, PROMPT[:SIZE]) == 0
    assert pending(world, PROMPT[:0]) == 0


def test_nothing_is_pending_where_waiting_is_off(world: World) -> None:
    eager = World(world.cache.name, SIZE, wait_for_pending=False)
    eager.start(PROMPT)
    assert pending(eager, PROMPT) == 0


def test_finished_requests_leave_nothing_behind(world: World) -> None:
    for prompt in (PROMPT, PROMPT, PROMPT[:7], PROMPT[:0]):
        world.serve(prompt)
        world.start(prompt).release()
    prefixes = world.cache._pending  # type: ignore[attr-defined]
    assert not prefixes._groups
    assert not prefixes._group_of


def test_a_shared_cold_prefix_is_prefilled_once(world: World) -> None:
    """16 prompts of 392 tokens sharing 384, page 128: 512 tokens instead of 6,272."""
    world = World(world.cache.name, 128, num_pages=64)
    rng = np.random.default_rng(1)
    head = rng.integers(0, 50_000, 384)
    waiting = [np.concatenate([head, rng.integers(0, 50_000, 8)]) for _ in range(16)]
    computed = 0
    while waiting or any(client.left for client in world.live):
        for _ in range(len(waiting)):
            prompt = waiting.pop(0)
            if pending(world, tokens_of(prompt)):
                waiting.append(prompt)
            else:
                world.start(prompt)
        for client in world.live:
            computed += client.left
            client.compute()
        world.check()
    assert computed == 512
