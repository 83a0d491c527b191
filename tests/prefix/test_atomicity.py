"""A fault anywhere in an operation leaves everything or nothing, and the operation can be retried.

An exception is raised before each line that a cache executes, one after another, and from each
allocation of an array. Both worlds know what every page holds, by the tokens written into it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
import pytest

import kvweave
from kvweave.kv.pool import IntArray
from kvweave.plugins import BACKENDS
from kvweave.prefix.lease import Lease, Namespace
from support import fuzzy_world, prefix_world
from support.prefix_world import Mirror, text

PACKAGE = Path(kvweave.__file__).parent
TRACED = tuple(
    str(PACKAGE / part)
    for part in ("prefix/", "kv/", "fuzzy/backend", "fuzzy/donors", "fuzzy/sessions")
)
SIZES = (1, 4, 16)
PAGES = 16


class FaultError(MemoryError):
    """The injected one."""


class Tracer:
    """Raises FaultError before line number `at` of those that TRACED executes."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.where = ""

    def calls(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.lines if frame.f_code.co_filename.startswith(TRACED) else None

    def lines(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                raise FaultError(self.where)
        return self.lines


@contextmanager
def at_line(at: int) -> Iterator[Tracer]:
    tracer, before = Tracer(at), sys.gettrace()
    sys.settrace(tracer.calls)
    try:
        yield tracer
    finally:
        sys.settrace(before)


class Allocator:
    """numpy, of which array-making function number `at` to be called raises FaultError."""

    MAKERS = ("array", "arange", "concatenate", "empty", "full", "zeros", "flatnonzero", "maximum")

    def __init__(self, at: int) -> None:
        self.left = at
        self.where = ""

    def __getattr__(self, name: str) -> Any:
        made = getattr(np, name)
        return self._limited(made) if name in self.MAKERS else made

    def _limited(self, make: Any) -> Any:
        def made(*arguments: Any, **more: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                self.where = make.__name__
                raise FaultError(f"no memory in {self.where}")
            return make(*arguments, **more)

        return made


@contextmanager
def at_allocation(at: int) -> Iterator[Allocator]:
    allocator = Allocator(at)
    modules = [
        module
        for module in list(sys.modules.values())
        if (getattr(module, "__file__", None) or "").startswith(TRACED) and hasattr(module, "np")
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "np", allocator)
        yield allocator


class ExactScene:
    """A `prefix_world`, and one operation of its cache that is about to happen."""

    def __init__(self, backend: str, size: int) -> None:
        self.size = size
        self.world = prefix_world.World(backend, size, PAGES, events=True, retention_share=0.4)
        self.client: prefix_world.Client | None = None
        """Whose operation it is, if it has a lease already."""
        self.operation: Callable[[], object]
        self.world.serve(text(3.5, size, 1), retain_seconds=600.0)
        self.world.serve(text(2.5, size, 2))

    def will_lease(self, prompt: IntArray, namespace: Namespace = prefix_world.NS) -> None:
        view = self.world.view(prompt, namespace)
        self.operation = lambda: self.world.cache.lease(view)

    def will_publish(
        self, prompt: IntArray, published: int = 0, meanwhile: IntArray | None = None
    ) -> None:
        """A client has computed its prompt, and published only its first pages."""
        client = self.client = self.world.start(prompt)
        client.compute(published * self.size)
        if meanwhile is not None:
            self.world.run(meanwhile)
        client.publish = lambda: None  # type: ignore[method-assign]
        assert client.compute()
        del client.publish  # type: ignore[method-assign]
        self.operation = lambda: self.world.cache.publish(
            client.lease, client.tokens, client.frontier
        )

    def will_release(self, client: prefix_world.Client) -> None:
        self.client = client
        self.operation = lambda: self.world.cache.release(client.lease)

    def state(self) -> object:
        cache, live = self.world.cache, self.world.live
        leases = [(c.lease.pages.tolist(), c.lease.published) for c in live]
        free = self.world.pool.num_free
        return sorted(self.world.resident(), key=str), cache.evictable_pages, free, leases

    def sound(self) -> None:
        """Pages and owners add up, and no page holds what it should not."""
        live = [client.lease for client in self.world.live]
        self.world.cache.check(live)
        resident = self.world.resident()
        assert len(set(resident)) == len(resident) == self.world.cache.cached_pages

    def finish(self) -> None:
        """All requests end; afterwards every prompt gets its own KV, and nothing is left over."""
        world = self.world
        for client in world.live:
            world.cache.release(client.lease)
        world.live.clear()
        world.cached = set(world.resident())
        world.check()
        mirror = Mirror()
        mirror.follow(world.cache.take_events())
        assert len(mirror.blocks) == len(world.cached)
        for seed in (9, 21, 9, 1):  # the same prompts, before and after the pool is filled again
            world.serve(text(3.5 if seed < 20 else PAGES, self.size, seed))
        world.check()
        world.evict(PAGES)
        assert world.pool.num_free == PAGES


def text_behind_a_shared_head(size: int) -> IntArray:
    return np.concatenate([text(3.5, size, 1)[: 2 * size], text(2.5, size, 9)])


def leasing(backend: str, size: int) -> ExactScene:
    scene = ExactScene(backend, size)
    scene.world.run(text(3.5, size, 1))
    scene.will_lease(text_behind_a_shared_head(size))  # splits a node
    return scene


def leasing_in_a_new_namespace(backend: str, size: int) -> ExactScene:
    scene = ExactScene(backend, size)
    scene.will_lease(text(3.5, size, 1), Namespace("model", salt="new"))
    return scene


def publishing(backend: str, size: int) -> ExactScene:
    scene = ExactScene(backend, size)
    scene.will_publish(text_behind_a_shared_head(size))
    return scene


def growing_a_run(backend: str, size: int) -> ExactScene:
    scene = ExactScene(backend, size)
    scene.will_publish(text(5.5, size, 9), published=2)
    return scene


def converging(backend: str, size: int) -> ExactScene:
    scene = ExactScene(backend, size)
    prompt = text(4.5, size, 9)
    other = np.concatenate([prompt[: 3 * size], text(2.5, size, 8)])
    scene.will_publish(other, published=1, meanwhile=prompt)
    return scene


def growing(backend: str, size: int) -> ExactScene:
    scene = ExactScene(backend, size)
    client = scene.client = scene.world.start(text(13.5, size, 9))
    scene.operation = lambda: scene.world.cache.grow(client.lease, 14 * size)
    return scene


def releasing(backend: str, size: int) -> ExactScene:
    scene = ExactScene(backend, size)
    scene.world.run(text(3.5, size, 1))
    scene.will_publish(text(4.5, size, 9), published=3)
    assert scene.client is not None
    scene.client.lease.retain_seconds = 600.0  # more than may be retained: some lose it
    scene.will_release(scene.client)
    return scene


def evicting(backend: str, size: int) -> ExactScene:
    scene = ExactScene(backend, size)
    scene.world.run(text(3.5, size, 1)[: 2 * size])
    scene.operation = lambda: scene.world.cache.evict(3)
    return scene


def resetting(backend: str, size: int) -> ExactScene:
    scene = ExactScene(backend, size)
    scene.operation = scene.world.cache.reset
    return scene


def recording(backend: str, size: int) -> ExactScene:
    scene = ExactScene(backend, size)
    client = scene.client = scene.world.run(text(3.5, size, 1))
    scene.operation = lambda: scene.world.cache.record(client.lease)
    return scene


class FuzzyScene:
    """A `fuzzy_world`, where a document of 160 tokens is cached behind a header."""

    def __init__(self, size: int, share_span: int = 0) -> None:
        config = replace(fuzzy_world.SMALL, share_span=share_span, refresh_tokens=5)
        self.world = fuzzy_world.World(480 // size, size, config, events=True)
        document = fuzzy_world.text(1, 160)
        self.moved = [*fuzzy_world.text(4, 18), *document, *fuzzy_world.text(5, 9)]
        self.world.serve([*fuzzy_world.text(2, 7), *document, *fuzzy_world.text(3, 9)])
        self.world.serve(fuzzy_world.text(6, 200))  # room for more must be made by eviction
        self.operation: Callable[[], object]
        self.client: fuzzy_world.Running | None = None

    def state(self) -> object:
        cache, live = self.world.cache, self.world.live
        leases = [
            (c.lease.pages.tolist(), c.lease.published, c.lease.plan, c.lease.shared) for c in live
        ]
        return cache.cached_pages, cache.evictable_pages, self.world.pool.num_free, leases

    def sound(self) -> None:
        self.world.check()

    def finish(self) -> None:
        world = self.world
        for running in list(world.live):
            world.finish(running)
        world.check()
        for _ in range(2):  # the same prompt, before and after the pool is filled again
            world.serve(self.moved)
            world.serve(fuzzy_world.text(8, world.pool.num_pages * world.pool.page_size - 1))
            world.check()
        world.cache.evict(world.pool.num_pages)
        assert world.pool.num_free == world.pool.num_pages


def moving(backend: str, size: int) -> FuzzyScene:
    scene = FuzzyScene(size)
    view = scene.world.view(scene.moved)
    scene.operation = lambda: scene.world.cache.lease(view)
    return scene


def sharing(backend: str, size: int) -> FuzzyScene:
    scene = FuzzyScene(size, share_span=32)
    view = scene.world.view(scene.moved)
    assert scene.world.cache.lease(view).shared
    scene = FuzzyScene(size, share_span=32)
    scene.operation = lambda: scene.world.cache.lease(view)
    return scene


def releasing_what_is_shared(backend: str, size: int) -> FuzzyScene:
    scene = FuzzyScene(size, share_span=32)
    client = scene.client = scene.world.start(scene.moved)
    assert client.lease.shared
    assert scene.world.compute(client)
    scene.operation = lambda: scene.world.cache.release(client.lease)
    return scene


def publishing_before_a_span(backend: str, size: int) -> FuzzyScene:
    scene = FuzzyScene(size)
    client = scene.client = scene.world.start(scene.moved)
    publish = scene.world.cache.publish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scene.world.cache, "publish", lambda *_: None)
        assert scene.world.compute(client)
    tokens = np.asarray(client.tokens, np.int32)
    scene.operation = lambda: publish(client.lease, tokens, client.frontier)
    return scene


def releasing_what_was_moved(backend: str, size: int) -> FuzzyScene:
    scene = FuzzyScene(size)
    client = scene.client = scene.world.start(scene.moved)
    assert scene.world.compute(client)
    scene.operation = lambda: scene.world.cache.release(client.lease)
    return scene


def keeping_for_a_session(backend: str, size: int) -> FuzzyScene:
    scene = FuzzyScene(size)
    client = scene.client = scene.world.start(scene.moved + fuzzy_world.text(7, 60), session="s")
    assert scene.world.compute(client)
    tokens = np.asarray(client.tokens, np.int32)
    scene.operation = lambda: scene.world.cache.retain(client.lease, tokens, client.frontier)
    return scene


def closing_a_session(backend: str, size: int) -> FuzzyScene:
    scene = FuzzyScene(size)
    scene.world.serve(scene.moved + fuzzy_world.text(7, 60), session="s")
    assert len(scene.world.cache._sessions) == 1
    scene.operation = lambda: scene.world.cache.close_session(fuzzy_world.HERE, "s")
    return scene


Scene: TypeAlias = ExactScene | FuzzyScene
Make: TypeAlias = Callable[[str, int], Scene]

EXACT: tuple[Make, ...] = (
    leasing,
    leasing_in_a_new_namespace,
    publishing,
    growing_a_run,
    converging,
    growing,
    releasing,
    evicting,
    resetting,
    recording,
)
FUZZY: tuple[Make, ...] = (
    moving,
    publishing_before_a_span,
    sharing,
    releasing_what_was_moved,
    releasing_what_is_shared,
    keeping_for_a_session,
    closing_a_session,
)
CASES = [(make, backend) for make in EXACT for backend in BACKENDS]
CASES += [(make, "fuzzy_match") for make in FUZZY]


EVICT_FIRST = (growing, moving, closing_a_session)
"""What they gave up before the fault stays given up."""


def faults(make: Make, backend: str, size: int, inject: Any) -> Iterator[tuple[str, str]]:
    """Each point of injection, with what is wrong after it ("" if nothing)."""
    for way, step in ("retry", 1), ("release", 3):
        for at in range(0, 10_000, step):
            scene = make(backend, size)
            if way == "release" and scene.client is None:
                break
            before, wrong, result = scene.state(), "", None
            with inject(at) as injected:
                try:
                    result = scene.operation()
                except FaultError:
                    result = FaultError
                except Exception as error:
                    wrong = f"{error!r}"
            if not injected.where:
                break
            try:
                assert not wrong, wrong
                judge(scene, make, way, before, result)
                if at % 5 == 0 or inject is at_allocation:  # costs the most
                    scene.finish()
            except Exception as error:
                wrong = f"{type(error).__name__} {error}"[:160]
            yield f"{way} after {injected.where}", wrong


def judge(scene: Scene, make: Make, way: str, before: object, result: object) -> None:
    """AssertionError or IntegrityError unless all is well after a fault, and after recovery."""
    world: Any = scene.world
    if result is FaultError:
        assert make in EVICT_FIRST or scene.state() == before, "half done"
        scene.sound()
        result = scene.operation() if way == "retry" else None
    if isinstance(result, Lease):
        world.cache.check([*(client.lease for client in world.live), result])
        world.cache.release(result)
    scene.sound()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("make", "backend"), CASES)
def test_a_fault_at_any_line_leaves_everything_or_nothing(
    make: Make, backend: str, size: int
) -> None:
    found = list(faults(make, backend, size, at_line))
    wrong = [(where, what) for where, what in found if what]
    assert found
    assert not wrong, f"{len(wrong)} of {len(found)}: {wrong[:5]}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("make", "backend"), CASES)
def test_an_array_that_cannot_be_allocated_costs_nothing_else(
    make: Make, backend: str, size: int
) -> None:
    found = list(faults(make, backend, size, at_allocation))
    wrong = [(where, what) for where, what in found if what]
    assert not wrong, f"{len(wrong)} of {len(found)}: {wrong[:5]}"
