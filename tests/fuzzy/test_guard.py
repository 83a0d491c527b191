"""Providers that misbehave in every way: none costs more than the reuse it was asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fuzzy_world import SMALL, World, text

from kvweave.fuzzy import guard as guards
from kvweave.fuzzy.guard import Guard
from kvweave.fuzzy.provider import Candidate, FuzzyMatchProvider, PublishedRun
from kvweave.kv.pool import IntArray
from kvweave.prefix.base import Namespace, RequestView

VIEW = RequestView("r", np.arange(100, dtype=np.int32), Namespace("m"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(FuzzyMatchProvider):
    """Takes `seconds` by a made-up clock, and then is right."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def match(self, view: RequestView, exact: int) -> Iterable[Candidate]:
        self.clock.now += self.seconds
        yield Candidate(10, 50, 3, 7)


def guarded(seconds: float) -> tuple[Guard, Slow, Clock]:
    clock = Clock()
    provider = Slow(clock, seconds)
    return Guard("slow", provider, 50, clock), provider, clock


def test_an_answer_in_time_counts_and_a_late_one_does_not() -> None:
    guard, provider, _ = guarded(0.04)
    assert guard.match(VIEW, 0) == [Candidate(10, 50, 3, 7)]
    provider.seconds = 0.06
    assert guard.match(VIEW, 0) == []
    assert guard.stats()["late"] == 1
    provider.seconds = 0.04
    assert len(guard.match(VIEW, 0)) == 1


def test_always_late_rests_longer_and_longer_and_comes_back() -> None:
    guard, provider, clock = guarded(0.06)
    for _ in range(guards.LATE_IN_A_ROW):
        guard.match(VIEW, 0)
    asked = guard.counts["asked"]
    guard.match(VIEW, 0)
    assert (guard.counts["asked"], guard.counts["resting"]) == (asked, 1)
    clock.now += guards.FIRST_REST
    guard.match(VIEW, 0)  # late again, at once: rests for twice as long
    assert guard.counts["asked"] == asked + 1
    clock.now += guards.FIRST_REST
    guard.match(VIEW, 0)
    assert guard.counts["asked"] == asked + 1
    clock.now += guards.FIRST_REST
    provider.seconds = 0.01
    assert len(guard.match(VIEW, 0)) == 1
    provider.seconds = 0.06
    guard.match(VIEW, 0)
    provider.seconds = 0.01
    assert len(guard.match(VIEW, 0)) == 1, "one late answer among good ones is no habit"


class Raising(FuzzyMatchProvider):
    def match(self, view: RequestView, exact: int) -> Iterable[Candidate]:
        yield Candidate(10, 20, 0, 0)
        raise OSError("the store of donors is gone")

    def on_published(self, run: PublishedRun) -> None:
        raise KeyError(run.rid)

    def on_evicted(self, pages: IntArray) -> None:
        raise ValueError("unknown page")

    def clear(self) -> None:
        raise ValueError("nothing to clear")

    def stats(self) -> dict[str, float]:
        raise ZeroDivisionError


def world_with(provider: type[FuzzyMatchProvider], monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(
        "kvweave.fuzzy.backend.create_provider", lambda name, *arguments: provider(*arguments)
    )
    world = World(config=replace(SMALL, fuzzy_provider="theirs"))
    world.check = lambda: world.cache.check([one.lease for one in world.live])  # type: ignore[method-assign]
    return world


def test_a_provider_that_raises_everywhere_costs_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = world_with(Raising, monkeypatch)
    for seed in range(3):
        assert world.serve(text(seed, 40)).lease.plan.spans == ()
        world.check()
    world.cache.evict(5)
    world.cache.reset()
    world.check()
    stats = world.cache.stats().provider
    assert stats["asked"] == 3
    assert stats["raised"] >= 9
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "theirs" in caplog.text
    assert "the store of donors is gone" in caplog.text


NONSENSE: list[Any] = [
    Candidate(10, 20, -1, 10),
    Candidate(10, 20, 10**6, 10),
    Candidate(10, 20, 0, 10**9),
    Candidate(-5, 20, 0, 10),
    Candidate(10, -3, 0, 10),
    Candidate(10, 0, 0, 10),
    Candidate(95, 20, 0, 10),
    Candidate(2**70, 20, 0, 10),
    Candidate(10, 20, 0, -20),
    Candidate(10, 20, 0, 11),  # one off
    Candidate(10.5, 20, 0, 10),  # type: ignore[arg-type]
    Candidate("10", 20, 0, 10),  # type: ignore[arg-type]
    None,
    "spans",
    (10, 20, 0, 10),
]


class Scripted(FuzzyMatchProvider):
    """Answers what the test tells it to."""

    answer: list[Any] = []

    def match(self, view: RequestView, exact: int) -> Iterable[Candidate]:
        return self.answer


def test_nonsense_is_refused_and_what_is_right_among_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_with(Scripted, monkeypatch)
    donor = world.start(text(1, 64))
    assert world.compute(donor)
    last = int(donor.lease.pages[9])  # positions 36 to 39
    answer = [*NONSENSE, Candidate(70, 20, last, 20), Candidate(70, 20, last + 1, 20)]
    monkeypatch.setattr(Scripted, "answer", answer)
    taken = text(1, 64)[18:42]
    running = world.start([*text(2, 68), *taken, *text(3, 8)])
    assert [(s.start, s.end, s.donor_start) for s in running.lease.plan.spans] == [(68, 92, 18)]
    assert world.cache.stats().provider["refused"] == len(NONSENSE)
    world.check()


def test_a_provider_may_ask_for_zeroed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "zeroed_layers", frozenset({0, 5}))
    world = world_with(Scripted, monkeypatch)
    donor = world.start(text(1, 64))
    assert world.compute(donor)
    monkeypatch.setattr(Scripted, "answer", [Candidate(8, 20, int(donor.lease.pages[7]), 8)])
    world.start([*text(2, 4), *text(1, 64)[4:]])
    assert [run.zeroed for run in world.mover.moved[-1]] == [{0, 5}]


class Endless(FuzzyMatchProvider):
    def match(self, view: RequestView, exact: int) -> Iterable[Candidate]:
        while True:
            yield Candidate(10, 20, 0, 10)


def test_an_endless_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with(Endless, monkeypatch)
    assert world.serve(text(1, 64)).lease.plan.spans == ()
    assert world.cache.stats().provider["proposed"] == guards.MOST_CANDIDATES


def test_another_namespaces_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with(Scripted, monkeypatch)
    donor = world.start(text(1, 64), Namespace("model", salt="a"))
    assert world.compute(donor)
    claim = Candidate(8, 20, int(donor.lease.pages[7]), 8)
    monkeypatch.setattr(Scripted, "answer", [claim])
    own = world.start([*text(2, 4), *text(1, 64)[4:]], Namespace("model", salt="a"))
    other = world.start([*text(2, 4), *text(1, 64)[4:]], Namespace("model", salt="b"))
    assert own.lease.plan.served > 40
    assert other.lease.plan.served == 0
