"""Random operations against the naive model: each one checked, on every backend."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvweave.kv.pool import IntArray
from kvweave.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvweave.prefix.lease import Namespace, RequestView
from support.prefix_world import NS, Client, World

SEEDS = range(9)
OPERATIONS = 2_000
NAMESPACES = (NS, Namespace("ab", "c"), Namespace("a", "bc"), Namespace("model", salt=""))
POLICIES = ("lru", "lfu", "slru", "priority")


class Chaos:
    """Does random things to a world, with texts that overlap in every way."""

    def __init__(self, world: World, rng: np.random.Generator) -> None:
        self.world = world
        self.rng = rng
        self.blocks = rng.integers(0, 9, (3, world.page_size)).astype(np.int32)
        self.happened: Counter[str] = Counter()

    def step(self) -> None:
        actions = {
            self.start: 9 if len(self.world.live) < 6 else 0,
            self.compute: 8,
            self.decode: 8,
            self.republish: 1,
            self.release: 3,
            self.evict: 1,
            self.pending_prefix: 2,
            self.reset: 0 if self.world.live else 0.3,
        }
        weights = np.array(list(actions.values()), np.float64)
        action = list(actions)[self.rng.choice(len(actions), p=weights / weights.sum())]
        self.happened[action.__name__] += 1
        action()
        self.world.check()

    def view(self, *, fuzzy: bool) -> RequestView:
        namespace = NAMESPACES[self.rng.choice(len(NAMESPACES), p=[0.7, 0.1, 0.1, 0.1])]
        bound = int(self.rng.integers(0, 4 * self.world.page_size))
        return self.world.view(
            self.prompt(),
            namespace,
            priority=int(self.rng.integers(3)),
            max_exact=bound if self.rng.random() < 0.1 else None,
            fuzzy=fuzzy,
        )

    def prompt(self) -> IntArray:
        """A few blocks of the few there are, cut anywhere."""
        size, count = self.world.page_size, int(self.rng.integers(1, 9))
        blocks = self.blocks[self.rng.choice(len(self.blocks), count, p=[0.7, 0.2, 0.1])]
        return blocks.reshape(-1)[: int(self.rng.integers(1, count * size + 1))]

    def start(self) -> None:
        client = self.world.admit(self.view(fuzzy=bool(self.rng.random() < 0.3)))
        self.world.cache.record(client.lease)
        self.happened["hit"] += client.lease.plan.exact > 0

    def one(self) -> Client | None:
        live = self.world.live
        return live[self.rng.integers(len(live))] if live else None

    def compute(self) -> None:
        client = self.one()
        chunk = int(self.rng.integers(1, 3 * self.world.page_size + 1))
        if client is not None and not client.compute(chunk):
            self.preempt(client)

    def decode(self) -> None:
        client, size = self.one(), self.world.page_size
        if client is None or client.left:
            return
        # Outputs are made of the same blocks: requests often meet in the same pages.
        block = self.blocks[self.rng.integers(2)][len(client.tokens) % size :]
        output = block[: self.rng.integers(1, size + 1)].tolist()
        if not client.decode(*output) or len(client.tokens) > 12 * size:
            self.preempt(client)

    def republish(self) -> None:
        client = self.one()
        if client is not None:
            before = client.lease.pages.copy()
            client.publish()
            assert np.array_equal(before, client.lease.pages)

    def preempt(self, client: Client) -> None:
        self.happened["preempt"] += 1
        self.finish(client)

    def release(self) -> None:
        client = self.one()
        if client is not None:
            self.finish(client)

    def finish(self, client: Client) -> None:
        client.release()
        self.world.cache.release(client.lease)  # twice is harmless

    def evict(self) -> None:
        self.world.evict(int(self.rng.integers(1, 6)))

    def reset(self) -> None:
        self.world.reset()

    def pending_prefix(self) -> None:
        """As the model has it: what live requests of the namespace will have in common with us."""
        view, cache = self.view(fuzzy=False), self.world.cache  # prefixes only
        matched = cache.match(view)
        promised = cache.pending_prefix(view, matched)
        if not promised:
            return
        assert promised > matched
        assert promised == max(
            _common(view, other, self.world.page_size) for other in self.world.live
        )
        self.happened["promise"] += 1


def _common(view: RequestView, other: Client, page_size: int) -> int:
    if view.namespace != other.view.namespace:
        return 0
    limit = min(len(view.tokens) - 1, len(other.view.tokens), other.lease.plan.publishable)
    if view.max_exact is not None:
        limit = min(limit, view.max_exact)
    same = view.tokens[:limit] == other.view.tokens[:limit]
    return int(limit if same.all() else same.argmin()) // page_size * page_size


class Mirror:
    """What a router believes, from events alone."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str | None]] = {}

    def follow(self, events: list[KVEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.blocks[name]
            else:
                assert isinstance(event, AllBlocksCleared)
                self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        for at, name in enumerate(event.block_hashes):
            assert name not in self.blocks, "stored twice"
            assert parent is None or parent in self.blocks
            tokens = event.token_ids[at * size : (at + 1) * size]
            self.blocks[name] = (parent, tokens, event.salt)
            parent = name

    def prefixes(self) -> list[tuple[str | None, bytes]]:
        """(salt, all tokens up to the block's end) of every block."""
        found = []
        for name, (_, _, salt) in self.blocks.items():
            path: list[tuple[int, ...]] = []
            at: int | None = name
            while at is not None:
                parent, tokens, _ = self.blocks[at]
                path.append(tokens)
                at = parent
            found.append((salt, np.array(path[::-1], np.int32).tobytes()))
        return found


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
