"""Faults for an engine of enginekit: a trap that one request springs, and the places to set it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest

from support.enginekit import World

WORDS = "the injected fault"


@dataclass
class Trap:
    """Raises when `victim` steps on it, at the given times (counted from 0; None: each time)."""

    victim: str = "victim"
    times: Iterable[int] | None = None
    met: int = 0
    fired: int = 0
    armed: bool = True
    error: type[Exception] = RuntimeError
    leased: str = ""
    """Who is being lent something right now, for places that do not know whom they serve."""

    def spring(self, *rids: str) -> None:
        if not self.armed or self.victim not in rids:
            return
        self.met += 1
        if self.times is None or self.met - 1 in self.times:
            self.fired += 1
            raise self.error(WORDS)


Place: TypeAlias = Callable[[World, Trap, pytest.MonkeyPatch], None]


def before(
    find: Callable[[World], Any],
    name: str,
    whose: Callable[..., Iterable[str]],
    after: bool = False,
) -> Place:
    """The method `name` of what `find` finds raises before it does anything, or `after` it has."""

    def place(world: World, trap: Trap, patch: pytest.MonkeyPatch) -> None:
        target = find(world)
        original = getattr(target, name)

        def trapped(*args: Any, **more: Any) -> Any:
            rids = list(whose(*args))
            if not after:
                trap.spring(*rids)
            result = original(*args, **more)
            if after:
                trap.spring(*rids)
            return result

        patch.setattr(target, name, trapped)

    return place


def cache_of(world: World) -> Any:
    return world.engine.cache


def scheduler_of(world: World) -> Any:
    return world.engine.scheduler


def by_rid(thing: Any, *_: Any) -> list[str]:
    """Of a view or a lease."""
    return [thing.rid]


def by_rows(rows: Iterable[Any], *_: Any) -> list[str]:
    return [row.sequence.group.request.rid for row in rows]


def everyone(*_: Any) -> list[str]:
    return ["victim"]


def while_leasing(find: Callable[[World], Any], name: str) -> Place:
    """As `before`, for what does not know whom it serves: while the victim is lent something."""

    def place(world: World, trap: Trap, patch: pytest.MonkeyPatch) -> None:
        lend = world.engine.cache.lease

        def lease(view: Any) -> Any:
            trap.leased = view.rid
            try:
                return lend(view)
            finally:
                trap.leased = ""

        patch.setattr(world.engine.cache, "lease", lease)
        before(find, name, lambda *_: [trap.leased])(world, trap, patch)

    return place


def forward(prefill: bool = True, decode: bool = True) -> Place:
    """BatchExecutor with the victim in them write nonsense where KV should be, and fail."""

    def place(world: World, trap: Trap, patch: pytest.MonkeyPatch) -> None:
        runner, batch_builder = world.runner, world.engine._executor._batch_builder
        pack, rows = batch_builder.pack, []

        def noted(given: Any) -> Any:
            rows[:] = [row for row in given if prefill if row.prefill]
            rows.extend(row for row in given if decode if not row.prefill)
            return pack(given)

        def torn(batch: Any) -> None:
            try:
                trap.spring(*by_rows(rows))
            except Exception:
                runner.tokens[batch.slots] = runner.positions[batch.slots] = -7
                raise

        patch.setattr(batch_builder, "pack", noted)
        patch.setattr(runner, "before", torn)

    return place


def answer_of(world: World, trap: Trap) -> Any:
    answers = world.engine._answers.items()
    return next(each for s, each in answers if s.group.request.rid == trap.victim)


def voice(part: Callable[[Any], Any], name: str) -> Place:
    """A part of the victim's own answer, which exists once it has been added."""

    def place(world: World, trap: Trap, patch: pytest.MonkeyPatch) -> None:
        add = world.engine.add

        def added(request: Any) -> None:
            add(request)
            if request.rid == trap.victim:
                before(lambda _: part(answer_of(world, trap)), name, everyone)(world, trap, patch)

        patch.setattr(world.engine, "add", added)

    return place


def no_numbers(world: World, trap: Trap, patch: pytest.MonkeyPatch) -> None:
    """The model's output for the victim is not a number."""
    batch_builder, runner, wanted = world.engine._executor._batch_builder, world.runner, []
    pack, compute = batch_builder.pack, runner.forward

    def noted(rows: Any) -> Any:
        batch, wanted[:] = pack(rows)
        return batch, list(wanted)

    def spoilt(batch: Any) -> Any:
        logits = compute(batch)
        for part in wanted:
            try:
                trap.spring(*by_rows([part.row]))
            except RuntimeError:
                logits[part.first :][: len(part.scored) + 1] = float("nan")
        return logits

    patch.setattr(batch_builder, "pack", noted)
    patch.setattr(runner, "forward", spoilt)


def provider_of(world: World) -> Any:
    return world.engine.cache._guard._provider


def nonsense(world: World, trap: Trap, patch: pytest.MonkeyPatch) -> None:
    """The provider proposes what is no candidate."""

    def match(view: Any, exact: int) -> list[Any]:
        trap.met, trap.fired = 1, 1
        return [None, 7, object()] if view.rid == trap.victim else []

    patch.setattr(provider_of(world), "match", match)


def while_growing(find: Callable[[World], Any], name: str) -> Place:
    """As `before`, while pages are taken for the victim."""

    def place(world: World, trap: Trap, patch: pytest.MonkeyPatch) -> None:
        asking: list[str] = []
        grow = world.engine.cache.grow

        def grown(lease: Any, *args: Any, **more: Any) -> bool:
            asking[:] = [lease.rid]
            try:
                return grow(lease, *args, **more)
            finally:
                asking.clear()

        patch.setattr(world.engine.cache, "grow", grown)
        before(find, name, lambda *_: asking)(world, trap, patch)

    return place


class Sink:
    """Follows a cache, and may fail at it."""

    dropped = 0

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, events: Any) -> None:
        self.events += events

    def close(self) -> None:
        pass
