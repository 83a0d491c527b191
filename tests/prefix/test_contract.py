"""What every backend promises to its scheduler. `World` compares each step with a naive model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from world import NS, World, tokens_of

from kvweave.errors import IntegrityError
from kvweave.prefix.base import Namespace
from kvweave.prefix.plan import Plan, Span

MakeWorld = Callable[..., World]


def text(pages: float, page_size: int, seed: int = 0) -> np.ndarray:
    """A prompt that shares no page with one of another seed."""
    length = round(pages * page_size)
    return np.random.default_rng(seed).integers(0, 50_000, length).astype(np.int32)


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


# Publishing.


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
    client.lease.plan = Plan(len(prompt), spans=(Span(begin, size, "donor", 0),))
    assert client.compute()
    client.decode(*text(3, size, seed=1).tolist())
    world.check()
    assert world.match(client.tokens) == begin // size * size
    client.release()
    world.check()
    assert world.cache.cached_pages == begin // size


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


# Order of eviction.


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
