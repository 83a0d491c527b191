"""A cache under test beside a naive model of what each of its pages holds.

The model knows a page by (namespace, all tokens up to its end), as bytes: the only thing that KV
can depend on. Clients do what a scheduler does, and every step is compared with the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeAlias

import numpy as np

from kvweave.kv.pool import IntArray, PagePool
from kvweave.kv.relocation import MoveRun
from kvweave.prefix.base import create_cache
from kvweave.prefix.contract import CacheOptions
from kvweave.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvweave.prefix.lease import Lease, Namespace, RequestView

NS = Namespace("model")
Content: TypeAlias = tuple[Namespace, bytes]


def tokens_of(values: Sequence[int] | IntArray | range) -> IntArray:
    return np.array(values, np.int32)


def text(pages: float, page_size: int, seed: int = 0) -> IntArray:
    """A prompt that shares no page with one of another seed."""
    length = round(pages * page_size)
    return np.random.default_rng(seed).integers(0, 50_000, length).astype(np.int32)


class RecordingMover:
    """Moves nothing, and records every run."""

    fixed_because = None

    def __init__(self) -> None:
        self.runs: list[MoveRun] = []

    def move(self, runs: Sequence[MoveRun]) -> None:
        self.runs.extend(runs)


class World:
    def __init__(self, backend: str, page_size: int, num_pages: int = 64, **options: Any) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.cache = create_cache(backend, self.pool, CacheOptions(**options), RecordingMover())
        self.page_size = page_size
        self.keeps = backend != "none"
        self.lossy = False
        """Whether the backend may keep, and so find, less than all that was published."""
        self.content: list[Content | None] = [None] * num_pages
        self.cached: set[Content] = set()
        """What should be resident, each exactly once."""
        self.live: list[Client] = []
        self._rids = count()

    def view(
        self, tokens: Sequence[int] | IntArray, namespace: Namespace = NS, **more: Any
    ) -> RequestView:
        return RequestView(f"r{next(self._rids)}", tokens_of(tokens), namespace, **more)

    def match(
        self, tokens: Sequence[int] | IntArray, namespace: Namespace = NS, **more: Any
    ) -> int:
        return self.cache.match(self.view(tokens, namespace, **more))

    def start(
        self, tokens: Sequence[int] | IntArray, namespace: Namespace = NS, **more: Any
    ) -> Client:
        """Lease, as a scheduler does when it admits a request."""
        return self.admit(self.view(tokens, namespace, **more))

    def admit(self, view: RequestView) -> Client:
        expected = self.longest_prefix(view)
        assert self.cache.match(view) == expected
        before = self.cache.cached_pages
        client = Client(self, view, self.cache.lease(view))
        self.forget(before - self.cache.cached_pages)  # room for moved KV is made at once
        assert client.lease.plan.exact == expected
        self.live.append(client)
        return client

    def run(
        self, tokens: Sequence[int] | IntArray, namespace: Namespace = NS, **more: Any
    ) -> Client:
        """Start and compute the whole prompt."""
        client = self.start(tokens, namespace, **more)
        assert client.compute()
        return client

    def serve(
        self, tokens: Sequence[int] | IntArray, namespace: Namespace = NS, **more: Any
    ) -> None:
        """A whole request: start, be counted, compute, finish."""
        client = self.start(tokens, namespace, **more)
        self.cache.record(client.lease)
        assert client.compute()
        client.release()

    def evict(self, pages: int) -> int:
        could = self.cache.evictable_pages
        freed = self.cache.evict(pages)
        assert freed == min(pages, could)
        self.forget(freed)
        return freed

    def reset(self) -> None:
        self.cache.reset()
        self.forget(len(self.cached))
        assert not self.cached

    def forget(self, freed: int) -> None:
        """The cache evicted: the model follows, once it is sure that this was allowed."""
        left = set(self.resident())
        assert left <= self.cached
        assert len(self.cached) - len(left) == freed
        assert self.held() <= left, "something was evicted that a live request holds"
        self.cached = left

    def held(self) -> set[Content | None]:
        """What live requests lock: what they published, and the paths of donors they read."""
        held: set[Content | None] = set()
        for client in self.live:
            lease, donors = client.lease, set[Content | None]()
            held.update(client.published())
            for node in getattr(lease, "pinned", ()):
                donors.update(self.content[page] for page in self.cache.tree.path_pages(node))
            assert {self.content[page] for run in lease.shared for page in run.pages} <= donors
            held |= donors
        return held

    def resident(self) -> list[Content]:
        """What the cache's pages hold, by what was written into them."""
        pages = [page for run in self.cache.resident() for page in run.tolist()]
        held = [self.content[page] for page in pages]
        return [content for content in held if content is not None]

    def longest_prefix(self, view: RequestView) -> int:
        """What a match should find: the naive way."""
        if self.lossy:
            return self.cache.match(view)
        limit = max(0, len(view.tokens) - 1)
        if view.max_exact is not None:
            limit = min(limit, view.max_exact)
        end = 0
        while end + self.page_size <= limit:
            prefix = view.tokens[: end + self.page_size].tobytes()
            if (view.namespace, prefix) not in self.cached:
                break
            end += self.page_size
        return end

    def check(self) -> None:
        """Everything adds up, and every page holds the KV that its readers expect."""
        self.cache.check([client.lease for client in self.live])
        assert self.cache.cached_pages == len(self.cached)
        resident = self.resident()
        assert len(resident) == self.cache.cached_pages
        assert set(resident) == self.cached
        assert self.cache.evictable_pages == len(self.cached - self.held())
        page = 4 * self.page_size
        for namespace, prefix in self.cached:
            assert len(prefix) == page or (namespace, prefix[:-page]) in self.cached
        for client in self.live:
            expected = client.published()
            assert [self.content[p] for p in client.lease.pages[: len(expected)]] == expected


class Client:
    """One request, as its scheduler drives it."""

    def __init__(self, world: World, view: RequestView, lease: Lease) -> None:
        self.world = world
        self.view = view
        self.tokens = view.tokens
        self.lease = lease
        self.done = 0
        """Of the plan's positions to compute, then of the output."""
        self.frontier = self.lease.plan.frontier(0)
        self._contents: list[Content] = []

    @property
    def left(self) -> int:
        """Prompt positions still to compute."""
        return len(self.lease.plan.compute) - self.done

    def compute(self, positions: int | None = None) -> bool:
        """Compute the next positions of the prompt, all by default; False if there is no room."""
        positions = self.left if positions is None else min(positions, self.left)
        chosen = self.lease.plan.compute[self.done : self.done + positions]
        if not len(chosen):
            return True
        if not self._grow(int(chosen[-1]) + 1):
            return False
        self.done += len(chosen)
        self._computed(chosen, self.lease.plan.frontier(self.done))
        return True

    def decode(self, *output: int) -> bool:
        """Append tokens, and compute them one by one; False if there is no room for one."""
        for token in output:
            self.tokens = np.append(self.tokens, np.int32(token))
            if not self._grow(len(self.tokens)):
                self.tokens = self.tokens[:-1]
                return False
            self._computed(tokens_of([len(self.tokens) - 1]), len(self.tokens))
        return True

    def publish(self) -> None:
        self.world.cache.publish(self.lease, self.tokens, self.frontier)
        if self.world.keeps:
            self.world.cached.update(self.published())

    def published(self) -> list[Content]:
        """What the first pages of the lease hold, as far as they may be shared."""
        if not self.world.keeps or self not in self.world.live:
            return []
        shared = self.lease.published if self.world.lossy else self._shareable()
        return self.contents(shared // self.world.page_size)

    def contents(self, pages: int) -> list[Content]:
        size = self.world.page_size
        while len(self._contents) < pages:
            end = size * (len(self._contents) + 1)
            self._contents.append((self.view.namespace, self.tokens[:end].tobytes()))
        return self._contents[:pages]

    def release(self) -> None:
        self.world.live.remove(self)
        self.world.cache.release(self.lease)

    def _shareable(self) -> int:
        plan = self.lease.plan
        return min(self.frontier, plan.spans[0].start) if plan.spans else self.frontier

    def _grow(self, tokens: int) -> bool:
        world = self.world
        own = self.lease.own_slot(tokens)
        short = -(-own // world.page_size) - len(self.lease.pages) - world.pool.num_free
        before = world.cache.cached_pages
        grown = world.cache.grow(self.lease, tokens)
        evicted = before - world.cache.cached_pages
        assert evicted == (max(0, short) if grown else 0)
        world.forget(evicted)
        return grown

    def _computed(self, positions: IntArray, frontier: int) -> None:
        world, size = self.world, self.world.page_size
        self.frontier = frontier
        shareable = self._shareable()
        for at in np.unique(self.lease.own_slots(positions) // size).tolist():
            page = int(self.lease.pages[at])
            assert world.pool.owners(page) == 1, "computed into a page that others can see"
            whole = (at + 1) * size <= shareable
            world.content[page] = self.contents(at + 1)[at] if whole else None
        self.publish()


MakeWorld: TypeAlias = Callable[..., World]


NAMESPACES = (NS, Namespace("ab", "c"), Namespace("a", "bc"), Namespace("model", salt=""))


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
        pending = cache.pending_prefix(view, matched)
        if not pending:
            return
        assert pending > matched
        assert pending == max(
            _common(view, other, self.world.page_size) for other in self.world.live
        )
        self.happened["pending"] += 1


def _common(view: RequestView, other: Client, page_size: int) -> int:
    if view.namespace != other.view.namespace:
        return 0
    limit = min(len(view.tokens) - 1, other.lease.plan.publishable(len(other.view.tokens)))
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
