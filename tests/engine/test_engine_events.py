"""What an engine's life looks like to somebody who only hears of it: exact pages, all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from kvweave.errors import RequestError
from kvweave.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvweave.prefix.tree import upwards
from support.enginekit import SHARING_BACKENDS, World, make_world, prompt, random_request, request
from support.movedkit import DOCUMENT, fuzzy_world, healing_world, served_approximately, wrapped

Prefix = tuple[str | None, tuple[int, ...]]
"""A page by all that its KV depends on: the salt, and every token up to its end."""


class Follower:
    """Rebuilds the cache's content from its events. An EventSink."""

    def __init__(self) -> None:
        self.blocks: dict[int, Prefix] = {}
        self.stored: set[Prefix] = set()
        """Ever."""
        self.dropped = 0

    def publish(self, events: Sequence[KVEvent]) -> None:
        assert events, "a batch without events"
        for event in events:
            self.apply(event)

    def close(self) -> None: ...

    def apply(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                del self.blocks[name]
        else:
            self.store(event)

    def store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        before: Prefix = (event.salt, ()) if parent is None else self.blocks[parent]
        assert before[0] == event.salt
        for at, name in enumerate(event.block_hashes):
            assert name not in self.blocks, "stored twice"
            before = (event.salt, (*before[1], *event.token_ids[at * size : (at + 1) * size]))
            self.blocks[name] = before
        self.stored |= set(self.blocks.values())


def content(world: World) -> set[Prefix]:
    """What the cache really holds."""
    cache = world.engine.cache
    return set(_of_index(cache.index)) if cache.name == "hash" else set(_of_tree(cache.tree))


def _of_tree(tree) -> Iterable[Prefix]:
    for node in tree.nodes():
        tokens = [token for at in [*upwards(node)][::-1] for token in at.tokens.tolist()]
        for end in range(node.start, node.end, tree.page_size):
            yield node.namespace.salt, tuple(tokens[: end + tree.page_size])


def _of_index(index) -> Iterable[Prefix]:
    def prefix(page: int) -> Prefix:
        parent = int(index._parents[page])
        before = (index._heads[page].salt, ()) if parent < 0 else prefix(parent)
        return before[0], (*before[1], *index._tokens[page].tolist())

    return [prefix(int(page)) for page in index.resident()]


@pytest.mark.parametrize("backend", [*SHARING_BACKENDS, "fuzzy_match"])
@pytest.mark.parametrize("seed", range(3))
def test_a_follower_knows_what_is_cached_after_every_step(backend, seed):
    rng = np.random.default_rng(seed)
    follower = Follower()
    settings = {"page_size": int(rng.choice([1, 4, 16])), "pool_tokens": 384}
    if backend == "fuzzy_match":
        world = fuzzy_world(**settings, events=follower)
    else:
        world = make_world(backend, **settings, events=follower)
    for turn in range(80):
        new = random_request(rng, str(turn))
        try:
            world.engine.add(new)
        except RequestError:  # too long for this pool
            continue
        if rng.random() < 0.1:
            world.engine.abort(new.rid)
        world.step()
        assert set(follower.blocks.values()) == content(world)
    world.run()
    assert set(follower.blocks.values()) == content(world) != set()
    assert world.engine.snapshot().evicted_tokens > 0
    world.engine.flush_cache()
    assert follower.blocks == {}


def test_what_is_approximate_is_never_told():
    follower = Follower()
    world = fuzzy_world(events=follower)
    world.run(request("donor", wrapped(1, DOCUMENT)))
    before, tokens = set(follower.stored), wrapped(2, DOCUMENT)
    world.run(request("moved", tokens, 12))
    spans = world.answers["moved", 0].plan
    assert spans
    told = follower.stored - before
    assert all(len(prefix) <= spans[0].start for _, prefix in told)
    world.run(request("exact", tokens, 12, fuzzy=False))
    assert (None, tuple(tokens[: len(tokens) // 4 * 4])) in follower.stored


def test_what_is_healed_is_told_at_once():
    follower = Follower()
    world = healing_world(events=follower)
    tokens = served_approximately(world)
    while world.engine.heal():
        assert set(follower.blocks.values()) == content(world)
    assert (None, tuple(tokens[: (len(tokens) - 1) // 4 * 4])) in follower.stored


def test_salts_are_told_apart():
    follower = Follower()
    world = make_world(events=follower)
    tokens = prompt(17)
    for salt in (None, "", "a"):
        world.run(request(f"salt {salt}", tokens, 1, salt=salt))
    firsts = {prefix for prefix in follower.blocks.values() if len(prefix[1]) == 4}
    assert firsts == {(salt, tuple(tokens[:4])) for salt in (None, "", "a")}


def test_without_followers_nothing_is_collected():
    world = make_world()
    world.run(request("alone", prompt(40)))
    assert world.engine.cache.take_events() == []
