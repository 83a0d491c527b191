"""What requests share while they run, and what they never do."""

from __future__ import annotations

import numpy as np
import pytest

from kvweave.prefix.lease import Plan, Span
from support.prefix_world import MakeWorld, World, text


def test_pages_are_shared_while_the_prompt_is_still_being_computed(cache_world: MakeWorld) -> None:
    world = cache_world()
    size = world.page_size
    prompt = text(4.5, size)
    client = world.start(prompt)
    for pages in range(1, 5):
        client.compute(size)
        assert world.match(prompt) == min(pages, (len(prompt) - 1) // size) * size
        world.check()


def test_output_is_shared_while_it_is_being_generated(cache_world: MakeWorld) -> None:
    world = cache_world()
    size = world.page_size
    client = world.run(text(1, size))
    for page in range(2, 5):
        client.decode(*text(1, size, seed=page).tolist())
        assert world.match(np.append(client.tokens, np.int32(1))) == page * size
        world.check()


def test_publishing_the_same_progress_twice_changes_nothing(world: World) -> None:
    client = world.run(text(3.5, world.page_size))
    pages, stats, free = client.lease.pages.copy(), repr(world.cache.stats()), world.pool.num_free
    client.publish()
    assert np.array_equal(client.lease.pages, pages)
    assert (repr(world.cache.stats()), world.pool.num_free) == (stats, free)
    world.check()


def test_duplicates_converge_to_the_pages_that_came_first(cache_world: MakeWorld) -> None:
    world = cache_world()
    size = world.page_size
    prompt = text(4.0, size)
    clients = [world.start(prompt) for _ in range(3)]
    for _ in range(4):
        for client in clients:
            client.compute(size)
            world.check()
    first, *others = (client.lease.pages.tolist() for client in clients)
    assert all(other == first for other in others)
    assert world.cache.stats().converged_pages == 8
    assert world.pool.num_free == world.pool.num_pages - 4


def test_lockstep_outputs_converge_too(cache_world: MakeWorld) -> None:
    world = cache_world()
    clients = [world.run(text(1, world.page_size), fuzzy=False) for _ in range(3)]
    for token in text(3, world.page_size, seed=1).tolist():
        for client in clients:
            client.decode(token)
    world.check()
    assert world.pool.num_free == world.pool.num_pages - 4
    for client in clients:
        client.release()
    world.check()


def test_decoding_after_a_hit_never_writes_what_the_next_hit_reads(cache_world: MakeWorld) -> None:
    world = cache_world()
    prompt = text(2.5, world.page_size)
    for seed in range(3):
        client = world.run(prompt)  # `World` refuses to compute into a page that others see
        client.decode(*text(2, world.page_size, seed).tolist())
        world.check()
        client.release()
    world.check()


@pytest.mark.parametrize("start", [0, 1, 2.5])
def test_nothing_approximate_is_ever_published(cache_world: MakeWorld, start: float) -> None:
    world = cache_world()
    size = world.page_size
    prompt = text(6, size)
    begin = int(start * size)
    client = world.start(prompt)
    client.lease.plan = Plan(len(prompt), spans=(Span(begin, size, 1, 0),))
    assert client.compute()
    client.decode(*text(3, size, seed=1).tolist())
    world.check()
    assert world.match(client.tokens) == begin // size * size
    client.release()
    world.check()
    assert world.cache.cached_pages == begin // size


class Watched(np.ndarray):
    """Counts the tokens that anyone slices out of it."""

    seen = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        found = super().__getitem__(key)
        Watched.seen += found.size
        return found


def test_publishing_while_decoding_costs_the_new_pages_and_not_the_prompt(keeping: str) -> None:
    world = World(keeping, 16, num_pages=600)
    client = world.run(text(500, 16))
    tokens = np.concatenate([client.tokens, text(2, 16, seed=1)]).view(Watched)
    world.cache.grow(client.lease, len(tokens))
    costs = []
    for computed in range(len(client.tokens), len(tokens) + 1, 16):
        Watched.seen = 0
        world.cache.publish(client.lease, tokens, computed)
        costs.append(Watched.seen)
    assert costs[0] == 0
    assert all(0 < cost <= 8 * 16 for cost in costs[1:])
    world.cache.check([client.lease])
