"""A world without a model: every slot of KV is a row that says what it is.

A row holds the token, the position that its key is rotated to, whether it was computed exactly, and
a fingerprint of everything that it attended to. So a test can look at any slot and say whether
what lies there is what the cache claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.backend import FuzzyCache
from kvweave.kv.pool import IntArray, PagePool
from kvweave.kv.relocation import MoveRun
from kvweave.prefix.contract import CacheOptions
from kvweave.prefix.lease import Lease, Namespace, RequestView
from kvweave.prefix.tree import upwards

SMALL = FuzzyConfig(
    stride=4,
    min_span=8,
    min_suffix=2,
    sink_tokens=2,
    min_reuse_ratio=0.0,
    refresh_tokens=0,
    share_span=256,
    time_budget_ms=10_000.0,
)
"""Small enough that tests of a hundred tokens have many spans, which are copied unless a test says
otherwise; never late on a busy machine."""

HERE = Namespace("model")


class SlotMover:
    """Moves rows of a `World`, and keeps every call."""

    def __init__(self) -> None:
        self.fixed_because: str | None = None
        self.world: World
        self.moved: list[list[MoveRun]] = []
        self.fail_next = False

    def move(self, runs: Sequence[MoveRun]) -> None:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("no memory for the copy")
        kv = self.world
        for run in runs:
            assert len(run.sources) == len(run.targets)
            assert not set(run.sources.tolist()) & set(run.targets.tolist())
            assert not kv.moved[run.sources].any(), "KV was moved twice"
            inexact = run.sources[~kv.exact[run.sources]]
            assert kv.leasing is None or all(
                owner == (kv.leasing.namespace, kv.leasing.session) and owner[1] is not None
                for owner in kv.owner[inexact]
            ), "approximate KV of another session, or of none, was lent"
            assert kv.leasing is not None or not len(inexact), "a donor was itself approximate"
            owners = kv.pool._owners[run.targets // kv.pool.page_size]
            assert (owners == 1).all(), "moved KV was written into a shared page"
            kv.token[run.targets] = kv.token[run.sources]
            kv.position[run.targets] = kv.position[run.sources] + run.delta
            kv.exact[run.targets] = False
            kv.moved[run.targets] = True
            kv.print[run.targets] = 0
        self.moved.append(list(runs))


@dataclass(eq=False)
class Running:
    """A request as an engine would drive it."""

    view: RequestView
    lease: Lease
    tokens: list[int]
    done: int = 0
    """How many of the plan's computed positions, and then of the generated ones, have run."""

    @property
    def frontier(self) -> int:
        plan = self.lease.plan
        if self.done < len(plan.compute):
            return plan.frontier(self.done)
        return plan.length + self.done - len(plan.compute)


class World:
    """A pool, a fuzzy cache, the rows behind it, and an engine of a few lines."""

    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 4,
        config: FuzzyConfig = SMALL,
        **options: object,
    ) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.mover = SlotMover()
        self.mover.world = self
        self.cache = FuzzyCache(self.pool, CacheOptions(fuzzy=config, **options), self.mover)  # type: ignore[arg-type]
        slots = num_pages * page_size
        self.token = np.full(slots, -1, np.int32)
        self.position = np.full(slots, -1, np.int32)
        self.exact = np.zeros(slots, np.bool_)
        self.print = np.zeros(slots, np.int64)
        self.moved = np.zeros(slots, np.bool_)
        self.owner = np.full(slots, None, object)
        """Namespace and session of the request that computed the slot."""
        self.leasing: RequestView | None = None
        """The request whose lease is being made."""
        self.live: list[Running] = []
        self._names = 0

    # Driving.

    def view(
        self, tokens: Sequence[int] | IntArray, namespace: Namespace = HERE, **more: object
    ) -> RequestView:
        self._names += 1
        array = np.asarray(tokens, np.int32)
        return RequestView(f"r{self._names}", array, namespace, **more)  # type: ignore[arg-type]

    def start(
        self, tokens: Sequence[int] | IntArray, namespace: Namespace = HERE, **more: object
    ) -> Running:
        return self.admit(self.view(tokens, namespace, **more))

    def admit(self, view: RequestView) -> Running:
        """Lease, record, and look at every slot that the lease serves."""
        self.leasing = view
        lease = self.cache.lease(view)
        self.leasing = None
        self.cache.record(lease)
        running = Running(view, lease, view.tokens.tolist())
        self.live.append(running)
        self.look_at(running)
        return running

    def compute(self, running: Running, most: int = 10**9) -> bool:
        """Run up to `most` positions and publish; False, and nothing run, if there is no room."""
        plan, lease = running.lease.plan, running.lease
        decoded = range(plan.length, len(running.tokens))
        positions = [*plan.compute.tolist(), *decoded][running.done :][:most]
        if not positions:
            return True
        if not self.cache.grow(lease, positions[-1] + 1):
            return False
        slots = self.slots(lease, np.asarray(positions))
        shared = self.pool._owners[slots // self.pool.page_size] > 1
        assert not shared.any(), "a token was computed into a page that somebody else can see"
        exact_below = plan.spans[0].start if plan.spans else 10**9
        tokens = np.asarray(running.tokens, np.int32)
        self.token[slots] = tokens[positions]
        self.position[slots] = positions
        self.exact[slots] = np.asarray(positions) < exact_below
        self.print[slots] = fingerprints(tokens)[positions]
        self.moved[slots] = False
        self.owner[slots] = [(running.view.namespace, running.view.session)] * len(slots)
        running.done += len(positions)
        self.cache.publish(lease, tokens, running.frontier)
        return True

    def finish(self, running: Running, well: bool = False) -> None:
        """End a request at any time; twice is harmless. `well`: its session may keep its KV."""
        if well:
            tokens = np.asarray(running.tokens, np.int32)
            self.cache.retain(running.lease, tokens, running.frontier)
        self.cache.release(running.lease)
        self.cache.release(running.lease)
        self.live.remove(running)

    def serve(self, tokens: Sequence[int] | IntArray, **more: object) -> Running:
        """A whole request: admitted, computed, finished. Its lease's plan is still there to see."""
        running = self.start(tokens, **more)
        assert self.compute(running)
        self.finish(running, well=True)
        return running

    # Looking.

    def slots(self, lease: Lease, positions: IntArray) -> IntArray:
        size = self.pool.page_size
        before = np.zeros(len(positions), np.int64)
        for run in lease.shared:
            before += np.clip(positions - run.start, 0, run.end - run.start)
        own = np.minimum(positions - before, len(lease.pages) * size - 1)
        slots = lease.pages[own // size] * size + own % size
        for run in lease.shared:
            inside = (positions >= run.start) & (positions < run.end)
            places = run.slot + positions[inside] - run.start
            slots[inside] = run.pages[places // size] * size + places % size
        return slots

    def look_at(self, running: Running) -> None:
        """Every served slot holds the request's own token at its own position, from exact KV."""
        plan, tokens = running.lease.plan, running.view.tokens
        served = np.concatenate(
            [np.arange(plan.exact), *(np.arange(s.start, s.end) for s in plan.spans)]
        ).astype(np.int64)
        slots = self.slots(running.lease, served)
        assert np.array_equal(self.token[slots], tokens[served])
        turned = np.zeros(len(served), np.int64)
        for run in running.lease.shared:
            turned[(served >= run.start) & (served < run.end)] = run.delta
        assert np.array_equal(self.position[slots] + turned, served)
        assert self.exact[slots[turned != 0]].all()
        assert self.exact[slots[: plan.exact]].all()
        assert np.array_equal(self.print[slots[: plan.exact]], fingerprints(tokens[: plan.exact]))

    def check(self) -> None:
        """The cache's own proof, and: all KV in the tree is exact, in its place, and its own.

        What running requests read of donors is still there.
        """
        for running in self.live:
            if running.lease.shared:
                self.look_at(running)
        self.cache.check([running.lease for running in self.live])
        self.cache._guard._provider.anchors.check()  # type: ignore[attr-defined]
        size = self.pool.page_size
        for node in self.cache.tree.nodes():
            path = np.concatenate([at.tokens for at in reversed(list(upwards(node)))])
            slots = (node.pages[:, None] * size + np.arange(size)).ravel()
            assert self.exact[slots].all(), "approximate KV was published"
            assert np.array_equal(self.token[slots], node.tokens)
            assert np.array_equal(self.position[slots], np.arange(node.start, node.end))
            assert np.array_equal(self.print[slots], fingerprints(path)[node.start :])


def fingerprints(tokens: IntArray) -> npt.NDArray[np.int64]:
    """For every position a number that depends on all tokens up to it."""
    powers = np.cumprod(np.full(len(tokens), 0x9E3779B97F4A7C15, np.uint64))
    return (np.cumsum((tokens + 1).astype(np.uint64) * powers)).view(np.int64)


def text(seed: int, length: int, vocabulary: int = 50_000) -> list[int]:
    """Made-up tokens, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, vocabulary, length).tolist()  # type: ignore[no-any-return]


def joined(*parts: list[int]) -> list[int]:
    """One prompt made of parts."""
    return [token for part in parts for token in part]
