"""Session donors: who is lent what, and that pages, anchors and sessions add up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvweave.errors import IntegrityError
from kvweave.fuzzy.sessions import SessionDonors
from kvweave.kv.pool import IntArray, PagePool
from kvweave.prefix.lease import Lease, Namespace, Plan, RequestView, Span

HERE = Namespace("model")
STRIDE, SHORTEST = 4, 8


def text(seed: int, length: int) -> IntArray:
    return np.random.default_rng(seed).integers(0, 50_000, length).astype(np.int32)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class World:
    """A pool, the donors, and requests whose pages are told apart by what they hold."""

    def __init__(self, page_size: int = 4, pages: int = 400, most_generations: int = 0) -> None:
        self.pool = PagePool(pages, page_size)
        self.clock = Clock()
        self.donors = SessionDonors(
            self.pool, STRIDE, SHORTEST, 100.0, most_generations, clock=self.clock
        )
        self.tokens = np.full(pages * page_size, -1, np.int64)
        """By slot."""
        self.computed: dict[int, tuple[str, str | None, int]] = {}
        """By slot: request, session and position in which its KV was computed."""
        self.used = 0

    def serve(
        self,
        tokens: IntArray,
        spans: tuple[Span, ...],
        session: str | None,
        rid: str = "r",
        namespace: Namespace = HERE,
        computed: int | None = None,
    ) -> int:
        """One request, from lease to release; how many tokens were kept of it."""
        computed = len(tokens) if computed is None else computed
        size = self.pool.page_size
        pages = self.pool.alloc(-(-len(tokens) // size))
        assert pages is not None
        lease = Lease(
            RequestView(rid, tokens, namespace, session=session),
            Plan(len(tokens), spans=spans),
            pages,
        )
        slots = pages[np.arange(len(tokens)) // size] * size + np.arange(len(tokens)) % size
        served = {at for span in spans for at in range(span.start, span.end)}
        for at, slot in enumerate(slots.tolist()):
            self.tokens[slot] = tokens[at]
            self.computed.pop(slot, None)
            if at not in served:
                self.computed[slot] = rid, session, at
        self.used += 1
        kept = self.donors.keep(lease, tokens, computed, (0, self.used))
        self.pool.drop(pages)
        self.check()
        return kept

    def find(self, tokens: IntArray, session: str | None, namespace: Namespace = HERE):
        """Runs, each proven against the slots themselves."""
        view = RequestView("q", tokens, namespace, session=session)
        runs = self.donors.find(view, 0, seconds=10.0)
        for run in runs:
            slots = self.donors.slots(run)
            assert self.tokens[slots].tolist() == tokens[run.start : run.end].tolist()
            for at, slot in enumerate(slots.tolist()):
                assert self.computed[slot][1:] == (session, run.donor_start + at)
            assert int(slots[-1]) // self.pool.page_size == run.page
        return runs

    def check(self) -> None:
        self.donors.check()
        self.pool.check(list(self.donors.resident()))


DOCUMENT = text(1, 40)
QUESTION = text(2, 30)


def second_turn(world: World, session: str | None = "s", **more) -> tuple[IntArray, int]:
    """A moved document, and text that was computed behind it."""
    tokens = np.concatenate([text(3, 9), DOCUMENT, QUESTION])
    return tokens, world.serve(tokens, (Span(9, 40, 1, 0),), session, **more)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_what_was_computed_is_found_at_any_shift_and_moved_text_is_not(page_size: int) -> None:
    world = World(page_size)
    _, kept = second_turn(world)
    prompt = np.concatenate([text(4, 23), DOCUMENT, QUESTION, text(5, 10)])
    runs = world.find(prompt, "s")
    assert kept == 30
    (run,) = runs
    assert (run.start, run.end, run.donor_start) == (63, 93, 49)


def test_other_sessions_salts_and_requests_without_a_key_find_nothing() -> None:
    world = World()
    tokens, _ = second_turn(world)
    assert world.find(tokens, "s")
    assert world.find(tokens, "t") == []
    assert world.find(tokens, None) == []
    assert world.find(tokens, "s", Namespace("model", salt="x")) == []


def test_nothing_is_kept_without_a_session_or_without_moved_text() -> None:
    world = World()
    assert second_turn(world, session=None)[1] == 0
    assert world.serve(text(7, 60), (), "s") == 0, "it is exact, and the tree has it"
    assert len(world.donors) == 0


def test_only_what_has_kv_is_kept() -> None:
    world = World()
    assert second_turn(world, computed=49)[1] == 0
    assert second_turn(world, computed=60)[1] == 11


def test_generations_count_and_are_bounded() -> None:
    world = World(most_generations=2)
    tokens = np.concatenate([text(3, 9), DOCUMENT, QUESTION])
    spans = [(Span(9, 40, 1, 0, generation=donor),) for donor in range(3)]
    assert world.serve(tokens, spans[0], "a")
    assert world.serve(tokens, spans[1], "b")
    assert world.serve(tokens, spans[2], "c") == 0
    (run,) = [each for each in world.find(tokens, "b") if each.start >= 49]
    assert run.segment is not None
    assert run.segment.generation == 2


def test_healed_text_and_closed_sessions_go() -> None:
    world = World()
    second_turn(world, rid="one")
    world.donors.healed(HERE, "two", 1000)
    world.donors.healed(Namespace("model", salt="x"), "one", 1000)
    world.donors.healed(HERE, "one", 78)
    assert len(world.donors) == 1, "what is exact ends before the segment does"
    world.donors.healed(HERE, "one", 79)
    assert len(world.donors) == 0
    second_turn(world)
    second_turn(world, session="t")
    assert world.donors.close((HERE, "s")) == 30
    assert world.donors.close((HERE, "s")) == 0
    assert {each.session[1] for each in [world.donors.oldest()] if each} == {"t"}
    world.check()


def test_idle_sessions_expire() -> None:
    world = World()
    tokens, _ = second_turn(world)
    world.clock.now = 99.0
    world.donors.expire()
    assert world.find(tokens, "s")
    world.clock.now = 198.0
    world.donors.expire()
    assert world.find(tokens, "s"), "it was used meanwhile"
    world.clock.now = 300.0
    world.donors.expire()
    assert world.find(tokens, "s") == []
    world.check()


def test_what_is_held_stays() -> None:
    world = World()
    tokens, _ = second_turn(world)
    segment = world.find(tokens, "s")[0].segment
    assert segment is not None
    holder = Lease(RequestView("h", tokens, HERE), Plan(len(tokens)), np.zeros(0, np.int32))
    world.donors.hold(holder, [segment])
    assert world.donors.evictable_pages == 0
    assert world.donors.oldest() is None
    with pytest.raises(IntegrityError):
        world.donors.drop(segment)
    world.donors.clear()
    assert len(world.donors) == 1
    world.donors.let_go(holder)
    world.donors.let_go(holder)
    assert world.donors.evictable_pages == world.donors.pages
    world.donors.clear()
    assert world.pool.num_free == world.pool.num_pages


def test_the_least_recently_used_goes_first() -> None:
    world = World()
    for session in "abc":
        second_turn(world, session=session)
    first = world.donors.oldest()
    assert first is not None
    assert first.session[1] == "a"
    world.donors.touch(first.number, (0, 99))
    world.donors.touch(12345, (0, 100))
    second = world.donors.oldest()
    assert second is not None
    assert second.number == first.number + 1


@pytest.mark.parametrize("seed", range(6))
def test_a_long_mixed_life(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = World(int(rng.choice([1, 4, 16])), 2000)
    families = [text(100 + each, 200) for each in range(3)]
    held = []
    for step in range(300):
        roll, session = rng.random(), str(rng.choice(list("abc")))
        namespace = Namespace("model", salt=str(rng.choice(["", "x"])))
        family = families[rng.integers(3)]
        if roll < 0.45:
            moved, fresh = rng.integers(8, 40), rng.integers(0, 60)
            head = text(int(rng.integers(1e6)), int(rng.integers(1, 20)))
            begin = int(rng.integers(0, 100))
            tokens = np.concatenate([head, family[begin : begin + moved + fresh]])
            span = Span(len(head), int(min(moved, len(tokens) - len(head) - 1)), 1, begin)
            computed = int(rng.integers(span.end, len(tokens) + 1))
            world.serve(tokens, (span,), session, f"r{step % 9}", namespace, computed)
        elif roll < 0.75:
            begin = int(rng.integers(0, 150))
            prompt = np.concatenate([text(step, 5), family[begin : begin + 50]])
            runs = world.find(prompt, session, namespace)
            if runs and runs[0].segment is not None and rng.random() < 0.5:
                view = RequestView("h", prompt, namespace)
                holder = Lease(view, Plan(len(prompt)), np.zeros(0, np.int32))
                world.donors.hold(holder, [runs[0].segment])
                held.append(holder)
        elif roll < 0.85 and held:
            world.donors.let_go(held.pop(int(rng.integers(len(held)))))
        elif roll < 0.95:
            oldest = world.donors.oldest()
            if oldest is not None:
                world.donors.drop(oldest)
        else:
            world.donors.healed(namespace, f"r{step % 9}", int(rng.integers(200)))
        world.check()
    for holder in held:
        world.donors.let_go(holder)
    world.donors.clear()
    assert world.pool.num_free == world.pool.num_pages
