"""The contract of all backends with the scheduler; `World` compares each step with a model."""

from __future__ import annotations

import numpy as np
import pytest

from kvweave.errors import IntegrityError
from kvweave.prefix.lease import Namespace
from support.prefix_world import MakeWorld, World, text

# Matching.


def test_a_match_never_covers_the_last_token(cache_world: MakeWorld) -> None:
    world = cache_world()
    prompt = text(3, world.page_size)
    world.serve(prompt)
    assert world.match(prompt) == 2 * world.page_size
    assert world.match(np.append(prompt, np.int32(7))) == 3 * world.page_size
    world.check()


def test_a_match_is_whole_pages_of_the_same_tokens(cache_world: MakeWorld) -> None:
    world = cache_world()
    size = world.page_size
    prompt = text(4, size)
    world.serve(prompt)
    other = prompt.copy()
    other[2 * size + size // 2] += 1
    assert world.match(other) == 2 * size
    assert world.match(text(4, size, seed=1)) == 0


@pytest.mark.parametrize("length", [0, 1])
def test_a_key_shorter_than_a_page_matches_nothing_and_raises_nothing(
    world: World, length: int
) -> None:
    world.serve(text(2, world.page_size))
    prompt = text(2, world.page_size)[:length]
    client = world.start(prompt)
    client.publish()
    world.check()
    client.release()
    world.check()
    assert world.match(prompt) == 0


def test_max_exact_bounds_the_match_and_its_lease(cache_world: MakeWorld) -> None:
    world = cache_world()
    size = world.page_size
    prompt = text(4.0, size)
    world.serve(prompt)
    assert world.match(prompt, max_exact=0) == 0
    assert world.match(prompt, max_exact=2 * size) == 2 * size
    assert world.match(prompt, max_exact=3 * size - 1) == 2 * size
    client = world.run(prompt, max_exact=size)
    world.check()
    client.release()
    assert world.match(prompt) == 3 * size


def test_a_match_changes_nothing_not_even_recency(cache_world: MakeWorld) -> None:
    world = cache_world()
    old, new = text(2, world.page_size, 1), text(2, world.page_size, 2)
    world.serve(old)
    world.serve(new)
    before = repr(world.cache.stats())
    for _ in range(3):
        world.match(np.append(old, np.int32(1)))
    assert repr(world.cache.stats()) == before
    world.evict(2)
    assert world.match(old) == 0
    assert world.match(new) == world.page_size


# Holding and letting go.


def test_releasing_twice_is_harmless(world: World) -> None:
    client = world.start(text(2.5, world.page_size))
    client.compute(world.page_size)
    client.release()
    world.cache.release(client.lease)
    world.cache.publish(client.lease, client.tokens, len(client.tokens))
    assert len(client.lease.pages) == 0
    world.check()


def test_an_abort_after_a_published_chunk_frees_nothing_that_is_cached(
    cache_world: MakeWorld,
) -> None:
    world = cache_world()
    size = world.page_size
    prompt = text(5, size)
    client = world.start(prompt)
    client.compute(2 * size)
    world.cache.grow(client.lease, len(prompt))
    client.release()
    world.check()
    assert world.match(prompt) == 2 * size
    assert world.pool.num_free == world.pool.num_pages - 2


def test_growing_is_all_or_nothing(world: World) -> None:
    client = world.start(text(1, world.page_size))
    room = world.pool.num_pages * world.page_size
    assert not world.cache.grow(client.lease, room + 1)
    assert len(client.lease.pages) == 0
    assert world.pool.num_free == world.pool.num_pages
    assert world.cache.grow(client.lease, room)
    assert world.pool.num_free == 0
    world.check()


def test_finished_requests_make_room_before_anyone_is_refused(world: World) -> None:
    size, pages = world.page_size, world.pool.num_pages
    for seed in range(4):
        world.serve(text(pages // 4, size, seed))
    big = world.start(text(pages, size, seed=9))
    assert big.compute()
    world.check()


def test_a_lease_of_a_full_pool_serves_what_is_there(cache_world: MakeWorld) -> None:
    world = cache_world(num_pages=4)
    prompt = text(4, world.page_size)
    first = world.run(prompt)
    second = world.start(prompt)
    assert second.lease.plan.exact == 3 * world.page_size
    assert not second.compute()
    world.check()
    first.release()
    assert second.compute()
    world.check()


def test_a_lease_holds_exactly_what_it_matched(cache_world: MakeWorld) -> None:
    world = cache_world()
    size = world.page_size
    prompt = text(6, size)
    world.serve(prompt)
    client = world.start(prompt[: 2 * size + 1])
    assert world.cache.evictable_pages == 4
    assert world.evict(100) == 4
    world.check()
    client.release()
    assert world.evict(100) == 2


def test_the_evictable_figure_is_exact_through_splits_and_locks(cache_world: MakeWorld) -> None:
    world = cache_world()
    size = world.page_size
    prompt = text(8, size)
    world.serve(prompt)
    clients = [world.start(prompt[: cut * size + 1]) for cut in (6, 3, 3, 7, 1)]
    seen = []
    for client in clients:
        world.check()
        seen.append(world.cache.evictable_pages)
        client.release()
    world.check()
    assert seen == [1, 1, 1, 1, 7]
    assert world.cache.evictable_pages == 8


def test_eviction_takes_single_pages_from_the_tail(cache_world: MakeWorld) -> None:
    world = cache_world()
    size = world.page_size
    prompt = text(5, size)
    world.serve(prompt)
    prompt = np.append(prompt, np.int32(1))
    for left in range(4, -1, -1):
        assert world.evict(1) == 1
        assert world.match(prompt) == left * size
        world.check()
    assert world.evict(1) == 0
    assert world.pool.num_free == world.pool.num_pages


@pytest.mark.parametrize(
    ("policy", "less_worth"), [("lru", 5), ("lfu", 3), ("slru", 3), ("priority", 2)]
)
def test_room_can_be_made_of_only_what_is_worth_less_than_an_entry_of_earlier(
    cache_world: MakeWorld, policy: str, less_worth: int
) -> None:
    world = cache_world(eviction=policy, num_pages=8)
    size = world.page_size
    world.serve(text(2, size, seed=1))
    for _ in range(2):  # which hits all but the last page
        world.serve(text(3, size, seed=2), priority=1)
    key = world.cache.eviction_key(priority=0)
    world.serve(text(2, size, seed=3))
    client = world.start(text(8, size, seed=4))
    assert not world.cache.grow(client.lease, 8 * size, key)
    assert not len(client.lease.pages)
    assert 7 - world.cache.cached_pages == less_worth
    world.forget(less_worth)
    assert world.cache.grow(client.lease, (1 + less_worth) * size, key)
    assert not world.cache.grow(client.lease, (2 + less_worth) * size, key)
    world.check()
    client.release()
    assert world.cache.evict(8) == 7 - less_worth


def test_a_reset_forgets_all_and_is_refused_while_requests_live(cache_world: MakeWorld) -> None:
    world = cache_world()
    prompt = text(3, world.page_size)
    world.serve(prompt)
    for held in (prompt, prompt[:1], prompt[:0]):
        client = world.start(held)
        with pytest.raises(IntegrityError):
            world.cache.reset()
        world.check()
        client.release()
    world.reset()
    world.check()
    assert world.match(prompt) == 0
    world.serve(prompt)
    world.check()


def test_nobody_loses_computed_pages_to_a_reset(world: World) -> None:
    client = world.run(text(2.5, world.page_size))
    with pytest.raises(IntegrityError):
        world.cache.reset()
    world.check()
    client.release()
    world.cache.reset()
    assert world.pool.num_free == world.pool.num_pages


# Who may share.


@pytest.mark.parametrize(
    "namespaces",
    [
        (Namespace("m", "ab", "c"), Namespace("m", "a", "bc")),
        (Namespace("m"), Namespace("m", salt="")),
        (Namespace("m"), Namespace("m", adapter="")),
        (Namespace("m", adapter="x"), Namespace("m", salt="x")),
        (Namespace("m", salt="None"), Namespace("m")),
        (Namespace("m"), Namespace("m2")),
    ],
    ids=["fields", "empty salt", "empty adapter", "other field", "named None", "model"],
)
def test_nothing_is_shared_across_namespaces(
    keeping: str, namespaces: tuple[Namespace, Namespace]
) -> None:
    world = World(keeping, 4)
    prompt = text(3, 4)
    mine, theirs = namespaces
    world.serve(prompt, mine)
    assert world.match(prompt, mine) == 8
    assert world.match(prompt, theirs) == 0
    world.serve(prompt, theirs)
    world.check()
    assert world.cache.cached_pages == 6


# Counting.


def test_hits_are_counted_once_per_request(cache_world: MakeWorld) -> None:
    world = cache_world()
    size = world.page_size
    prompt = text(3, size)
    world.serve(prompt)
    for _ in range(5):
        world.start(
            prompt
        ).release()  # deferred, retried, preempted: not admitted for the first time
    world.serve(prompt)
    stats = world.cache.stats()
    assert (stats.requests, stats.query_tokens) == (2, 6 * size)
    assert stats.hit_tokens == {"exact": 2 * size}
    assert (stats.cached_pages, stats.evictable_pages) == (3, 3)
    world.evict(2)
    stats = world.cache.stats()
    assert (stats.cached_pages, stats.evictable_pages, stats.evicted_pages) == (1, 1, 2)
