"""Healing: what was served approximately becomes exact when idle, in nobody's way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from kvweave.config import CacheConfig, EngineConfig
from kvweave.engine import heal
from kvweave.engine.engine import Engine
from kvweave.engine.types import Completion
from kvweave.errors import RequestError
from kvweave.models import LoadedModel
from support.enginekit import (
    Faults,
    World,
    assert_answers,
    make_world,
    oracle_answer,
    prompt,
    request,
)
from support.movedkit import (
    DOCUMENT,
    HEALING,
    SMALL,
    healing_world,
    overlapping_request,
    served_approximately,
    wrapped,
)


def idle(world: World) -> int:
    """Let the engine heal until nothing is left to do; how many steps that took."""
    for steps in range(1000):
        world.engine.check()
        if not world.engine.heal():
            world.assert_idle()
            assert world.engine.snapshot().heals_waiting == 0
            return steps
    raise AssertionError("healing does not come to an end")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heal, "CHUNK", 16)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [16, 50, 2048])
def test_after_idle_time_the_same_prompt_is_exact(page_size, chunk, monkeypatch):
    monkeypatch.setattr(heal, "CHUNK", chunk)
    world = healing_world(page_size)
    tokens = served_approximately(world)
    assert not world.engine.has_work, "whoever waits for answers does not wait for healing"
    before = world.engine.snapshot()
    assert before.heals_waiting == 1
    steps = idle(world)
    world.run(request("again", tokens, 6))
    usage = world.answers["again", 0].usage
    assert usage.cached_tokens == (len(tokens) - 1) // page_size * page_size
    assert usage.moved_tokens == 0
    assert world.ids("again") == oracle_answer(tokens, 6)
    after = world.engine.snapshot()
    assert (after.healed, after.heals_dropped, after.heals_preempted) == (1, 0, 0)
    published = world.answers["moved", 0].plan[0].start // page_size * page_size
    assert after.healed_tokens == usage.cached_tokens - published, "each token once"
    assert steps == -(-after.healed_tokens // (-(-chunk // page_size) * page_size))
    world.assert_idle()


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_a_healed_prompt_hits_exactly_however_large_pages_are(page_size):
    """More than the shortest span lies behind its last full page, and in a donor too."""
    world = healing_world(page_size, pool_tokens=8192)
    document = prompt(500, 1)
    world.run(request("donor", wrapped(1, document, prompt(300, 2))))
    tokens = wrapped(2, document[:499])
    world.run(request("moved", tokens, 6))
    assert world.answers["moved", 0].usage.moved_tokens > 400
    idle(world)
    for rid in ("again", "and again"):
        world.run(request(rid, tokens, 6))
        usage, whole = world.answers[rid, 0].usage, (len(tokens) - 1) // page_size * page_size
        assert (usage.cached_tokens, usage.moved_tokens) == (whole, 0)
        assert world.ids(rid) == oracle_answer(tokens, 6)
        assert world.engine.snapshot().heals_waiting == 0
    assert world.engine.snapshot().healed == 1


def test_a_prompt_shorter_than_a_page_is_not_queued_for_healing():
    world = healing_world(256, pool_tokens=8192)
    world.run(request("donor", wrapped(1, DOCUMENT, prompt(300, 2))))
    world.run(request("moved", wrapped(2, DOCUMENT), 3))
    assert world.answers["moved", 0].usage.moved_tokens > 90
    now = world.engine.snapshot()
    assert (now.heals_waiting, now.heals_dropped) == (0, 0)


def test_healing_is_no_request(small_chunks):
    world = healing_world()
    tokens = served_approximately(world)
    before = world.engine.snapshot()
    idle(world)
    after = world.engine.snapshot()
    assert after.healed_tokens > 100
    unchanged = ("requests", "finished", "prompt_tokens", "hit_tokens", "prefill_tokens", "steps")
    for name in unchanged:
        assert getattr(after, name) == getattr(before, name), name
    assert world.engine.step() == []
    world.run(request("donee", wrapped(3, tokens[40:]), 3))
    assert world.answers["donee", 0].usage.moved_tokens > 80, "what is exact may be a donor"


@pytest.mark.parametrize("semantic", [True, False])
def test_what_is_healed_is_told_of_as_its_request_wanted(semantic, small_chunks):
    world = healing_world()
    served_approximately(world)
    idle(world)
    told = []
    provider = world.engine.cache._guard._provider
    with patch.object(provider, "on_published", side_effect=told.append):
        tokens = wrapped(5, DOCUMENT)
        world.run(replace(request("r", tokens, 6), fuzzy_semantic=semantic))
        assert world.answers["r", 0].usage.moved_tokens > 90
        served = len(told)
        idle(world)
    assert len(told) > served
    assert {run.semantic for run in told} == {semantic}


def test_off_by_default_and_only_for_what_was_approximate():
    world = make_world("fuzzy_match", fuzzy=SMALL)
    served_approximately(world)
    assert world.engine.snapshot().heals_waiting == 0
    assert not world.engine.heal()

    world = healing_world()
    world.run(request("cold", prompt(60, 1), 3))
    world.run(request("exact", prompt(60, 1), 3))
    world.run(request("demanding", wrapped(2, prompt(60, 1)), 3, fuzzy=False))
    assert world.engine.snapshot().heals_waiting == 0
    world.engine.add(request("gone", wrapped(3, prompt(60, 1)), 30))
    world.step()
    assert world.engine.scheduler.running[0].plan.approximate
    world.engine.abort("gone")
    assert world.engine.snapshot().heals_waiting == 0
    world.run(request("none wanted", wrapped(4, prompt(60, 1)), 0))
    assert world.engine.snapshot().heals_waiting == 1


def test_a_request_goes_first_and_healing_resumes_where_it_stopped(small_chunks):
    world = healing_world()
    tokens = served_approximately(world)
    for _ in range(3):
        assert world.engine.heal()
    world.engine.add(request("real", prompt(30, 7), 9))
    world.engine.add(request("with another", prompt(30, 9), 9))
    while world.engine.has_work:
        computed = world.engine.snapshot().healed_tokens
        assert not world.engine.heal()
        assert world.engine.snapshot().healed_tokens == computed == 3 * 16
        world.step()
    assert world.ids("real") == oracle_answer(prompt(30, 7), 9)
    idle(world)
    world.engine.add(request("no longer in its way", prompt(30, 8), 1))
    now = world.engine.snapshot()
    assert (now.healed, now.heals_preempted, now.heals_dropped) == (1, 1, 0)
    start = world.answers["moved", 0].plan[0].start // 4 * 4
    assert now.healed_tokens == (len(tokens) - 1) // 4 * 4 - start, "nothing twice"


def test_an_interrupted_chunk_leaves_nothing_and_is_computed_later(small_chunks):
    world = healing_world()
    tokens = served_approximately(world)
    assert world.engine.heal()
    before = world.engine.snapshot()
    assert world.engine.heal(lambda: True)
    assert world.engine.snapshot() == before
    world.assert_idle()
    world.engine.add(request("real", prompt(30, 7), 1))
    world.run()
    idle(world)
    now = world.engine.snapshot()
    assert (now.healed, now.heals_preempted) == (1, 1)
    world.run(request("again", tokens, 6))
    assert world.ids("again") == oracle_answer(tokens, 6)
    assert world.answers["again", 0].plan == ()


def test_a_fault_costs_that_prompt_its_healing_and_nobody_anything(small_chunks):
    world = healing_world()
    served_approximately(world)
    tokens = served_approximately(world, 3, "newer")
    assert world.engine.heal()
    world.runner.before = lambda batch: 1 / 0
    assert idle(world) == 2
    world.runner.before = lambda batch: None
    now = world.engine.snapshot()
    assert (now.healed, now.heals_dropped, now.failed) == (0, 2, 0)
    world.engine.flush_cache()
    served_approximately(world, 4, "third")
    idle(world)
    assert world.engine.snapshot().healed == 1
    world.run(request("again", tokens, 6))
    assert world.ids("again") == oracle_answer(tokens, 6)


def test_a_namespace_heals_for_itself_alone():
    world = healing_world()
    tokens = served_approximately(world, salt="a")
    idle(world)
    for salt, exact in ((None, False), ("", False), ("b", False), ("a", True)):
        world.run(request(f"as {salt}", tokens, 3, salt=salt))
        usage = world.answers[f"as {salt}", 0].usage
        assert usage.cached_tokens == ((len(tokens) - 1) // 4 * 4 if exact else 0)
        assert usage.moved_tokens == 0
        assert world.ids(f"as {salt}") == oracle_answer(tokens, 3)


def test_the_queue_is_bounded_keeps_the_newest_and_each_prompt_once():
    world = healing_world(most=2, pool_tokens=4096)
    prompts = {rid: served_approximately(world, seed, rid) for seed, rid in enumerate("abc", 2)}
    assert world.engine.snapshot().heals_waiting == 2
    assert world.engine.snapshot().heals_dropped == 1
    world.run(request("b again", prompts["b"], 3, n=3))
    assert world.engine.snapshot().heals_waiting == 2
    assert world.engine.snapshot().heals_dropped == 1
    idle(world)
    assert world.engine.snapshot().healed == 2
    for rid, exact in (("a", False), ("b", True), ("c", True)):
        world.run(request(f"{rid} last", prompts[rid], 1))
        assert (world.answers[f"{rid} last", 0].plan == ()) == exact


def test_of_a_session_only_the_newest_prompt_is_healed():
    world = healing_world(pool_tokens=4096)
    prompts = {
        rid: served_approximately(world, seed, rid, session="s")
        for seed, rid in enumerate("abc", 2)
    }
    served_approximately(world, 9, "other")
    waiting = world.engine.snapshot()
    assert (waiting.heals_waiting, waiting.heals_dropped) == (2, 0), "one of s, and another's"
    idle(world)
    for rid, exact in (("a", False), ("b", False), ("c", True)):
        world.run(request(f"{rid} last", prompts[rid], 1))
        assert (world.answers[f"{rid} last", 0].plan == ()) == exact


def test_what_others_have_computed_meanwhile_is_not_computed_again():
    world = healing_world()
    tokens = served_approximately(world)
    world.run(request("exactly", tokens, 3, fuzzy=False))
    assert idle(world) == 1
    now = world.engine.snapshot()
    assert (now.healed, now.healed_tokens, now.heals_dropped) == (0, 0, 0)


@pytest.mark.parametrize(
    ("later", "room"),
    [("", True), ("old", True), ("old donor", False), ("old donor moved", True)],
)
def test_room_is_made_of_what_is_older_and_never_of_what_was_used_since(later, room):
    world = healing_world(8, pool_tokens=432)
    texts = {"old": prompt(129, 50), "donor": wrapped(1, DOCUMENT)}
    world.run(request("old", texts["old"], 1))
    texts["moved"] = served_approximately(world)
    for name in later.split():
        world.run(request(f"{name} once more", texts[name], 1))
    assert world.engine.snapshot().evicted_tokens == 0
    world.run(request("filling", prompt(world.engine.snapshot().free_tokens - 15, 51), 1))
    assert world.engine.snapshot().free_tokens < 24
    idle(world)
    now = world.engine.snapshot()
    assert (now.healed, now.heals_dropped) == (int(room), int(not room))
    assert (now.evicted_tokens > 90) == room
    for name in later.split() if "moved" not in later else ["moved"]:
        world.run(request(f"{name} at last", texts[name], 1))
        cached = world.answers[f"{name} at last", 0].usage.cached_tokens
        assert cached == (len(texts[name]) - 1) // 8 * 8


def test_flushing_the_cache_is_possible_in_the_middle_and_ends_healing(small_chunks):
    world = healing_world()
    served_approximately(world)
    world.engine.heal()
    world.engine.flush_cache()
    now = world.engine.snapshot()
    assert (now.heals_waiting, now.free_tokens) == (0, now.total_tokens)
    assert not world.engine.heal()


@pytest.mark.parametrize("seed", range(6))
def test_random_lives_with_idle_moments_answer_right(seed, small_chunks):
    rng = np.random.default_rng(seed)
    world = healing_world(
        page_size=int((1, 4, 16)[seed % 3]),
        most=int(rng.choice([2, 100])),
        pool_tokens=int(rng.choice([640, 2560])),
        eviction=str(rng.choice(["lru", "lfu", "slru", "priority"])),
        chunked_prefill_size=int(rng.choice([7, 32, 256])),
        max_running_requests=int(rng.choice([1, 3, 8])),
        max_queued_requests=12,
    )
    faults = seed % 2 == 0
    world.runner.before = Faults(rng, 0.05 if faults else 0.0)
    requests = {}
    for turn in range(60):
        if rng.random() < 0.5:
            new = overlapping_request(rng, f"{turn}")
            try:
                world.engine.add(new)
                requests[new.rid] = new
            except RequestError:
                world.engine.check()
        if requests and rng.random() < 0.05:
            for delta in world.engine.abort(str(rng.choice(list(requests)))):
                world.answers[delta.rid, delta.index].finish_reason = delta.finish_reason
        for _ in range(int(rng.integers(0, 30))):
            if world.engine.has_work:
                world.step()
            else:
                world.engine.heal(lambda: rng.random() < 0.2)
                world.engine.check()
    world.runner.before = lambda batch: None
    world.run()
    idle(world)
    assert_answers(world, requests, faults)
    assert world.engine.snapshot().healed > 0
    world.engine.flush_cache()
    assert world.engine.snapshot().free_tokens == world.engine.snapshot().total_tokens


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_real_model_is_interrupted_between_layers_and_heals_to_the_cold_answer(
    tiny: Callable[[str], LoadedModel], page_size: int
):
    loaded = tiny("llama")

    def answer(engine: Engine, rid: str, tokens: list[int]) -> Completion:
        engine.add(request(rid, tokens, 6, logprobs=0))
        found = Completion()
        while engine.has_work:
            for delta in engine.step():
                found.extend(delta)
        return found

    def engine_of(backend: str) -> Engine:
        cache = CacheConfig(
            prefix_cache_backend=backend, page_size=page_size, max_total_tokens=2048
        )
        return Engine(EngineConfig(cache=cache, fuzzy=HEALING), loaded)

    engine, tokens = engine_of("fuzzy_match"), wrapped(2, DOCUMENT)
    answer(engine, "donor", wrapped(1, DOCUMENT))
    assert answer(engine, "moved", tokens).usage.moved_tokens > 90
    layers = iter([False, True])
    assert engine.heal(lambda: next(layers))
    assert next(layers, None) is None, "asked before each of two layers"
    assert engine.snapshot().healed_tokens == 0
    while engine.heal():
        engine.check()
    warm = answer(engine, "again", tokens)
    assert warm.usage.cached_tokens == (len(tokens) - 1) // page_size * page_size
    cold = answer(engine_of("none"), "cold", tokens)
    assert warm.token_ids == cold.token_ids
    found, true = ([each.logprob for each in one.logprobs] for one in (warm, cold))
    np.testing.assert_allclose(found, true, atol=1e-4)
