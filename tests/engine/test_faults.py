"""A fault in every phase of a request: it alone fails, in words, and nothing is left of it.

Beside it run others, one of them over the same text; what they answer is known from the oracle.
Afterwards nobody owns a page, and the same prompt is answered, from KV that is exact.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import NamedTuple

import pytest

import kvweave.engine.execution.executor
import kvweave.fuzzy.backend
from kvweave.plugins import BACKENDS
from support.enginekit import World, make_world, oracle_answer, prompt, request
from support.faultkit import (
    WORDS,
    Place,
    Sink,
    Trap,
    before,
    by_rid,
    by_rows,
    cache_of,
    everyone,
    forward,
    no_numbers,
    nonsense,
    provider_of,
    scheduler_of,
    voice,
    while_growing,
    while_leasing,
)
from support.movedkit import DOCUMENT, SMALL, wrapped


class Phase(NamedTuple):
    place: Place
    fails: bool = True
    """Else the victim's answer is right all the same."""
    fuzzy: bool = False
    """Only there is such a phase."""
    times: tuple[int, ...] | None = None
    says: str = WORDS


MAKER = lambda world: world.engine._maker  # noqa: E731
REPORTER = lambda world: world.engine._reporter  # noqa: E731
SINK = lambda world: world.engine.components.events  # noqa: E731
POOL = lambda world: world.engine.cache.pool  # noqa: E731

PHASES = {
    "made": Phase(
        before(MAKER, "make", lambda sequence, *_: [sequence.group.request.rid]), times=(1,)
    ),
    "matched": Phase(before(cache_of, "match", by_rid), fails=False),
    "awaiting its producer": Phase(before(cache_of, "pending_prefix", by_rid)),
    "leased": Phase(before(cache_of, "lease", by_rid)),
    "provider": Phase(before(provider_of, "match", by_rid), fails=False, fuzzy=True),
    "nonsense": Phase(nonsense, fails=False, fuzzy=True),
    "verified": Phase(
        before(lambda world: world.engine.cache._donors, "verified", by_rid),
        fails=False,
        fuzzy=True,
    ),
    "planned": Phase(while_leasing(lambda _: kvweave.fuzzy.backend, "plan_spans"), fuzzy=True),
    "moved": Phase(while_leasing(lambda world: world.runner, "move"), fails=False, fuzzy=True),
    "room for what is moved": Phase(while_leasing(POOL, "alloc"), fuzzy=True),
    "recorded": Phase(before(cache_of, "record", by_rid)),
    "grown": Phase(before(cache_of, "grow", by_rid)),
    "allocated": Phase(while_growing(POOL, "alloc")),
    "room made by eviction": Phase(while_growing(cache_of, "evict")),
    "packed": Phase(before(lambda world: world.engine._executor._batch_builder, "pack", by_rows)),
    "computed": Phase(forward()),
    "computed, once": Phase(forward(), fails=False, times=(0,)),
    "second chunk": Phase(forward(decode=False), times=(2, 3, 4, 5, 6)),
    "decode": Phase(forward(prefill=False), times=tuple(range(2, 20))),
    "sampled": Phase(
        before(
            lambda _: kvweave.engine.execution.executor,
            "row_outputs",
            lambda logits, wanted, states: by_rows(part.row for part in wanted),
        )
    ),
    "no numbers": Phase(no_numbers, says="no valid numbers"),
    "penalised": Phase(voice(lambda answer: answer.sampling.adjuster, "collect")),
    "scored": Phase(voice(lambda answer: answer, "score")),
    "accepted": Phase(voice(lambda answer: answer, "accept"), times=(3,)),
    "detokenized": Phase(voice(lambda answer: answer._detokenizer, "add"), times=(2,)),
    "searched for stops": Phase(voice(lambda answer: answer._stops, "feed"), times=(2,)),
    "committed": Phase(before(scheduler_of, "commit", lambda row: by_rows([row]))),
    "published": Phase(before(cache_of, "publish", by_rid)),
    "second publication": Phase(before(cache_of, "publish", by_rid), times=(1,)),
    "after it was published": Phase(before(cache_of, "publish", by_rid, after=True)),
    "released": Phase(before(cache_of, "release", by_rid), fails=False, times=(0, 1)),
    "after it was released": Phase(
        before(cache_of, "release", by_rid, after=True), fails=False, times=(0, 1)
    ),
    "events taken": Phase(before(cache_of, "take_events", everyone), fails=False),
    "events sent": Phase(before(SINK, "publish", everyone), fails=False),
    "step counted": Phase(before(REPORTER, "planned", everyone), fails=False),
    "end counted": Phase(before(REPORTER, "ended", everyone), fails=False),
    "remembered for healing": Phase(
        before(lambda world: world.engine._healer, "served", everyone), fails=False
    ),
}

CASES = [
    (phase, backend)
    for phase in PHASES
    for backend in BACKENDS
    if backend == "fuzzy_match" or not PHASES[phase].fuzzy
]


def faulty_world(backend: str, page_size: int) -> World:
    """Steps of one chunk of a prompt and some decodes; a pool that must be evicted from."""
    return make_world(
        backend,
        page_size=page_size,
        pool_tokens=512,
        chunked_prefill_size=96,
        events=Sink(),
        fuzzy=dataclasses.replace(SMALL, heal=True),
    )


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_a_fault_costs_its_own_request_and_nobody_else(name, backend, page_size, monkeypatch):
    phase, world = PHASES[name], faulty_world(backend, page_size)
    trap = Trap(times=phase.times)
    world.run(request("donor", wrapped(1, DOCUMENT), 20), request("full", prompt(300, 5), 2))
    early, late = request("early", prompt(30, 3), 40), request("late", wrapped(3, DOCUMENT), 9)
    victim = request(
        "victim",
        wrapped(2, DOCUMENT),
        12,
        presence_penalty=1e-6 if name == "penalised" else 0.0,
        prompt_logprobs=1 if name == "scored" else None,
        stop=("~never~",),
        n=2,
    )
    world.engine.add(early)
    world.step()
    with monkeypatch.context() as patch:
        phase.place(world, trap, patch)
        refused = pytest.raises(RuntimeError, match=WORDS) if name == "made" else nullcontext()
        with refused:
            world.engine.add(victim)
        world.run(late)
    if trap.met == 0:
        assert (name, backend) in NEVER_REACHED
        return
    assert trap.fired > 0
    for bystander in (early, late):
        expected = oracle_answer(bystander.prompt_ids, bystander.sampling.max_tokens)
        assert world.ids(bystander.rid) == expected
    assert_the_victims_fate(world, phase, victim)
    assert_nothing_is_left(world, victim)


NEVER_REACHED = {
    ("published", "none"),
    ("second publication", "none"),
    ("after it was published", "none"),
    ("room made by eviction", "none"),
    ("events sent", "none"),
}
"""A cache that keeps nothing."""


def assert_the_victims_fate(world: World, phase: Phase, victim) -> None:
    ended = [world.answers[rid, index] for rid, index in world.answers if rid == "victim"]
    if phase.fails:
        failed = [answer for answer in ended if answer.finish_reason == "error"]
        assert failed or not ended
        assert all(phase.says in answer.error for answer in failed)
    for answer in ended:
        if answer.finish_reason != "error":
            assert phase.fails is False or len(ended) == 2
            assert answer.token_ids == oracle_answer(victim.prompt_ids, 12)


def assert_nothing_is_left(world: World, victim) -> None:
    while world.engine.heal():
        world.engine.check()
    world.assert_idle()
    for rid, fuzzy in (("exactly", False), ("again", True)):
        world.run(request(rid, victim.prompt_ids, 12, fuzzy=fuzzy))
        assert world.ids(rid) == oracle_answer(victim.prompt_ids, 12)
    world.assert_idle()
    world.engine.flush_cache()
    assert world.engine.snapshot().free_tokens == world.engine.snapshot().total_tokens
