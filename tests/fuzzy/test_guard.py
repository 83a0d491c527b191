"""Tests of the guard: a provider's faults cost only the reuse it was asked for."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from kvweave.config import FuzzyConfig
from kvweave.fuzzy import guard as guards
from kvweave.fuzzy.guard import Guard, LateError, LentDonors, Worker
from kvweave.fuzzy.provider import Candidate, Donors, FuzzyMatchProvider, PublishedRun
from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Namespace, RequestView, Tier
from support.fuzzy_world import SMALL, World, text

VIEW = RequestView("r", np.arange(100, dtype=np.int32), Namespace("m"))


ANSWER = Candidate(10, 50, 3, 7)


class Scripted(FuzzyMatchProvider):
    """Answers what the test tells it to."""

    answer: list[Any] = []
    figures: Any = {}

    def stats(self) -> Any:
        return self.figures

    def match(self, view: RequestView, exact: int) -> Iterable[Candidate]:
        return self.answer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A worker whose calls are late when the test says so, by no clock at all."""

    late = False

    def run(self, call: Callable[[], Any], seconds: float) -> Any:
        assert seconds == 0.05
        if self.late:
            raise LateError
        return call()


def guarded() -> tuple[Guard, Slow, Clock]:
    donors, clock, worker = LentDonors(World().cache._donors), Clock(), Slow()
    provider = Scripted(donors, SMALL)
    provider.answer = [ANSWER]
    guard = Guard("slow", provider, donors, 50, clock)
    guard._worker = worker  # type: ignore[assignment]
    return guard, worker, clock


def test_one_late_answer_costs_one_request() -> None:
    guard, worker, _ = guarded()
    for _ in range(2 * guards.LATE_IN_A_ROW):
        worker.late = True
        assert guard.match(VIEW, 0) == []
        worker.late = False
        assert guard.match(VIEW, 0) == [ANSWER]
    assert guard.counts["late"] == 2 * guards.LATE_IN_A_ROW
    assert guard.counts["resting"] == 0


def test_always_late_rests_longer_and_longer_and_comes_back() -> None:
    guard, worker, clock = guarded()
    worker.late = True
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
    for _ in range(20):
        clock.now += guards.LONGEST_REST
        guard.match(VIEW, 0)
    assert guard.counts["asked"] == asked + 21, "it never rests for longer than said"
    clock.now += guards.LONGEST_REST
    worker.late = False
    assert guard.match(VIEW, 0) == [ANSWER]
    assert guard.match(VIEW, 0) == [ANSWER]


def test_statistics_are_read_with_match_once_a_second() -> None:
    guard, _, clock = guarded()
    provider = guard._provider
    assert isinstance(provider, Scripted)
    provider.figures = {"donors": 3}
    assert guard.match(VIEW, 0) == [ANSWER]
    assert guard.told == {"donors": 3.0}
    provider.figures = {"donors": 4}
    guard.match(VIEW, 0)
    assert guard.told == {"donors": 3.0}
    clock.now += 1
    guard.match(VIEW, 0)
    assert guard.told == {"donors": 4.0}
    for nonsense in (None, {"donors": "many"}, 7):
        provider.figures = nonsense
        clock.now += 1
        assert guard.match(VIEW, 0) == [ANSWER]
        assert guard.told == {"donors": 4.0}


def test_a_worker_gives_up_on_a_call_and_is_there_again_when_it_has_ended() -> None:
    worker, go_on = Worker("test"), threading.Event()
    assert worker.run(lambda: 7, 60) == 7
    with pytest.raises(LateError):
        worker.run(lambda: go_on.wait(60), 0.01)
    with pytest.raises(LateError):
        worker.run(lambda: 8, 60)  # at once: the one before has not ended
    go_on.set()
    assert worker._last is not None
    worker._last.exception(60)
    with pytest.raises(TimeoutError, match="its own"):
        worker.run(_raise, 60)
    assert worker.run(lambda: 9, 60) == 9


def test_the_thread_of_a_forgotten_worker_ends() -> None:
    worker = Worker("to be forgotten")
    worker.run(lambda: None, 60)
    [thread] = [each for each in threading.enumerate() if each.name == "to be forgotten"]
    del worker
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def _raise() -> None:
    raise TimeoutError("its own")


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


def world_with(
    provider: type[FuzzyMatchProvider], monkeypatch: pytest.MonkeyPatch, budget_ms: float = 1e4
) -> World:
    monkeypatch.setattr(
        "kvweave.fuzzy.backend.create_provider", lambda name, *arguments: provider(*arguments)
    )
    world = World(config=replace(SMALL, provider="theirs", time_budget_ms=budget_ms))
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


class Hanging(FuzzyMatchProvider):
    """Stops wherever the test says so, until the test lets it go on."""

    where = "match"

    def __init__(self, donors: Donors, config: FuzzyConfig) -> None:
        super().__init__(donors, config)
        self.go_on, self.told = threading.Event(), 0
        self.found: object = None

    def hang(self, where: str) -> None:
        if self.where == where:
            self.go_on.wait(60)

    def match(self, view: RequestView, exact: int) -> Iterable[Candidate]:
        self.hang("match")
        try:
            self.found = self.donors.run_around(view, 10, 0, 0)
        except RuntimeError as error:
            self.found = error
        return []

    def on_published(self, run: PublishedRun) -> None:
        self.told += 1
        self.hang("on_published")


def test_a_provider_that_hangs_costs_its_reuse_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guards, "FIRST_REST", 1e6)
    world = world_with(Hanging, monkeypatch, budget_ms=20.0)
    provider = world.cache._guard._provider
    assert isinstance(provider, Hanging)
    for seed in range(5):
        world.serve(text(seed, 40))
        world.check()
    stats = world.cache.stats().provider
    assert stats["late"] >= guards.LATE_IN_A_ROW
    assert stats["resting"] > 0
    provider.where = "nowhere"
    provider.go_on.set()
    world.cache._guard._worker._last.exception(60)  # type: ignore[union-attr]
    assert isinstance(provider.found, RuntimeError), "it looked at a tree that was not its to see"
    world.cache._guard._resting_until = 0.0
    told = provider.told
    world.serve(text(9, 40))
    assert provider.told == told + 1
    assert provider.found is None


def test_a_provider_that_hangs_when_told_something_misses_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Hanging, "where", "on_published")
    world = world_with(Hanging, monkeypatch, budget_ms=20.0)
    for seed in range(3):
        world.serve(text(seed, 40))
    provider = world.cache._guard._provider
    assert isinstance(provider, Hanging)
    assert provider.told == 1
    provider.go_on.set()


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


class Fatal(BaseException):
    """As a panic in Rust arrives: not an Exception."""


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, GeneratorExit, Fatal])
def test_exceptions_that_end_threads_cost_only_reuse(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], bounded: bool
) -> None:
    class Panicking(FuzzyMatchProvider):
        def match(self, view: RequestView, exact: int) -> Iterable[Candidate]:
            raise error

        def on_published(self, run: PublishedRun) -> None:
            raise error

        def on_evicted(self, pages: IntArray) -> None:
            raise error

        def clear(self) -> None:
            raise error

        def stats(self) -> dict[str, float]:
            raise error

        def settle(self, seconds: float) -> bool:
            raise error

    monkeypatch.setattr(Panicking, "bounded", bounded)
    world = world_with(Panicking, monkeypatch)
    for seed in range(3):
        assert world.serve(text(seed, 40)).lease.plan.spans == ()
    world.cache.evict(5)
    world.cache.reset()
    assert not world.cache.settle(1)
    assert world.cache.stats().provider["raised"] >= 8
    world.check()


def test_ctrl_c_passes_through_a_provider_in_the_main_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(FuzzyMatchProvider):
        bounded = True

        def match(self, view: RequestView, exact: int) -> Iterable[Candidate]:
            raise KeyboardInterrupt

    world = world_with(Interrupted, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        world.start(text(1, 40))
    world.check()  # the lease of that request is gone
    # Raised elsewhere it does not come from the user.
    answered: list[Any] = []
    elsewhere = threading.Thread(target=lambda: answered.append(world.serve(text(1, 40))))
    elsewhere.start()
    elsewhere.join(60)
    [running] = answered
    assert running.lease.plan.spans == ()


@pytest.mark.parametrize("bounded", [False, True])
def test_a_provider_cannot_write_into_what_it_sees(
    monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    refused: list[str] = []

    class Writing(FuzzyMatchProvider):
        def write(self, *arrays: IntArray) -> None:
            for array in arrays:
                for attempt in (lambda a=array: a.fill(7), lambda a=array: a.setflags(write=True)):
                    try:
                        attempt()
                    except ValueError as error:
                        refused.append(str(error))

        def match(self, view: RequestView, exact: int) -> Iterable[Candidate]:
            self.write(view.tokens)
            return []

        def on_published(self, run: PublishedRun) -> None:
            self.write(run.tokens, run.pages)
            self.donors.tokens(int(run.pages[-1])).fill(9)

        def on_evicted(self, pages: IntArray) -> None:
            self.write(pages)

    monkeypatch.setattr(Writing, "bounded", bounded)
    world = world_with(Writing, monkeypatch)
    prompt = text(1, 64)
    running = world.serve(prompt)
    assert running.view.tokens.tolist() == prompt
    world.check()
    assert world.serve([*prompt[:60], 1, 2, 3]).lease.plan.exact == 60
    world.check()
    world.cache.evict(4)
    world.check()
    assert len(refused) >= 8


def test_proposals_in_numpy_numbers_become_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with(Scripted, monkeypatch)
    donor = world.start(text(1, 64))
    assert world.compute(donor)
    page = donor.lease.pages[9]
    answer = [Candidate(np.int64(70), np.int32(20), page, np.int16(20))]  # type: ignore[arg-type]
    monkeypatch.setattr(Scripted, "answer", answer)
    monkeypatch.setattr(Scripted, "zeroed_layers", {np.int64(3)})
    running = world.start([*text(2, 68), *text(1, 64)[18:42], *text(3, 8)])
    [span] = running.lease.plan.spans
    assert json.loads(json.dumps(asdict(span)))["start"] == 68
    assert [type(one) for one in (span.start, span.length, span.donor_start)] == [int] * 3
    [run] = world.mover.moved[-1]
    assert [type(layer) for layer in run.zeroed] == [int]
    world.check()


class Broken:
    """Raises when it is read."""

    @property
    def tier(self) -> Tier:
        raise OSError("its tier is gone")

    def __repr__(self) -> str:
        raise OSError("even its name is gone")


WORDS = np.arange(4, dtype=np.int32)


@pytest.mark.parametrize(
    "proposal",
    [
        Broken(),
        Candidate(10, 4, 0, 10, tier="another"),  # type: ignore[arg-type]
        Candidate(10, 4, 0, 10, tier=Tier.EXACT),
        Candidate(10, 4, 0, 10, Tier.PARAPHRASE, similarity=math.nan, donor_tokens=WORDS),
        Candidate(10, 4, 0, 10, Tier.PARAPHRASE, similarity=1e300, donor_tokens=WORDS),
        Candidate(10, 4, 0, 10, Tier.PARAPHRASE, similarity=-math.inf, donor_tokens=WORDS),
        Candidate(10, 4, 0, 10, Tier.PARAPHRASE, similarity="alike", donor_tokens=WORDS),  # type: ignore[arg-type]
        Candidate(10, 4, 0, 10, Tier.PARAPHRASE, lead=0.5, donor_tokens=WORDS),  # type: ignore[arg-type]
        Candidate(10, 4, 0, 10, Tier.PARAPHRASE, donor_tokens=None),
        Candidate(10, 4, 0, 10, Tier.PARAPHRASE, donor_tokens=WORDS[:3]),
        Candidate(10, 4, 0, 10, Tier.PARAPHRASE, donor_tokens=WORDS.astype(np.float64)),  # type: ignore[arg-type]
        Candidate(10, 4, 0, 10, Tier.PARAPHRASE, donor_tokens=WORDS.astype(np.int64) + 2**40),
    ],
)
def test_proposals_of_wrong_types_are_refused_at_the_border(proposal: Any) -> None:
    guard, _, _ = guarded()
    provider = guard._provider
    assert isinstance(provider, Scripted)
    provider.answer = [proposal, ANSWER]
    assert guard.match(VIEW, 0) == [ANSWER]
    assert guard.counts["refused"] == 1


def test_the_donors_words_are_copied_when_they_are_proposed() -> None:
    guard, _, _ = guarded()
    theirs = WORDS.astype(np.int64)
    provider = guard._provider
    assert isinstance(provider, Scripted)
    words = Candidate(
        10, 4, 0, 10, Tier.PARAPHRASE, similarity=np.float32(1.0000001), donor_tokens=theirs
    )  # type: ignore[arg-type]
    provider.answer = [words]
    [found] = guard.match(VIEW, 0)
    theirs.fill(9)
    assert found.donor_tokens is not None
    assert found.donor_tokens.tolist() == WORDS.tolist()
    assert (found.similarity, type(found.similarity)) == (1.0, float)


def test_layers_that_cannot_be_read_cost_only_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: Scripted) -> frozenset[int]:
        raise OSError("no layers")

    monkeypatch.setattr(Scripted, "zeroed_layers", property(gone))
    world = world_with(Scripted, monkeypatch)
    donor = world.start(text(1, 64))
    assert world.compute(donor)
    monkeypatch.setattr(Scripted, "answer", [Candidate(8, 20, int(donor.lease.pages[7]), 8)])
    running = world.start([*text(2, 4), *text(1, 64)[4:]])
    assert running.lease.plan.spans == ()
    assert world.cache.stats().provider["raised"] == 1
    world.check()


def test_a_provider_that_is_slow_to_be_told_rests_and_hears_of_evictions_later() -> None:
    """Each call is within its limit; together they would stop every step."""
    guard, _, clock = guarded()
    told: list[tuple[str, list[int]]] = []

    class Sleepy(Scripted):
        def on_published(self, run: PublishedRun) -> None:
            clock.now += 0.045
            told.append(("published", run.pages.tolist()))

        def on_evicted(self, pages: IntArray) -> None:
            told.append(("evicted", pages.tolist()))

    guard._provider = Sleepy(guard._donors, SMALL)

    def publish(page: int) -> None:
        pages = np.array([page], np.int32)
        guard.on_published(PublishedRun("r", Namespace("m"), pages, 0, pages))

    for page in range(8):
        publish(page)
    assert told == [("published", [0]), ("published", [1])]
    assert guard.counts["resting"] == 6
    guard.on_evicted(np.array([1, 5], np.int32))
    guard.on_evicted(np.array([1], np.int32))
    assert len(told) == 2
    clock.now += 0.045 / guards.TELLING_SHARE
    publish(9)
    assert told[2:] == [("evicted", [1, 5]), ("published", [9])]
    began, spent = clock.now, len(told)
    while clock.now < began + 100:
        publish(3)
        clock.now += 0.01
    assert (len(told) - spent) * 0.045 <= guards.TELLING_SHARE * 101
