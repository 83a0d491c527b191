"""The engine over moved text that requests read where a donor has it, with KV that can be read."""

from __future__ import annotations

import numpy as np
import pytest

from kvweave.config import SpeculativeConfig
from support.enginekit import World, assert_answers, oracle_answer, prompt, random_life, request
from support.movedkit import DOCUMENT, fuzzy_world, overlapping_request, wrapped

LONG = prompt(240, 3)


def shared_tokens(world: World, rid: str) -> int:
    return sum(span.shared for span in world.answers[rid, 0].plan)


@pytest.mark.parametrize(("page_size", "pool_tokens"), [(1, 800), (4, 960), (16, 1200)])
def test_many_askers_of_one_document_run_at_once_in_a_pool_that_holds_it_once(
    page_size: int, pool_tokens: int
) -> None:
    world = fuzzy_world(page_size, pool_tokens=pool_tokens, max_running_requests=16)
    world.run(request("donor", wrapped(1, LONG), 1))
    asked = [request(f"r{at}", wrapped(2 + at, LONG), 8) for at in range(16)]
    world.run(*asked)
    assert world.peak_running == 16  # copies would take 16 x 250
    assert world.engine.snapshot().preemptions == 0
    for each in asked:
        assert world.ids(each.rid) == oracle_answer(each.prompt_ids, 8)
        assert shared_tokens(world, each.rid) > 200
    world.assert_idle()


def test_who_is_alone_lets_go_of_donors_that_leave_no_room() -> None:
    """A donor of 220 tokens stays while 120 of them are read; the answer needs the room."""
    world = fuzzy_world(pool_tokens=320)
    world.run(request("donor", prompt(96, 7) + DOCUMENT + prompt(4, 8), 1))
    tokens = wrapped(2, DOCUMENT)
    world.run(request("long", tokens, 320 - len(tokens)))
    assert world.ids("long") == oracle_answer(tokens, 320 - len(tokens))
    assert world.runner.shared > 0
    assert world.engine.snapshot().preemptions == 1
    world.assert_idle()


def test_two_that_share_and_need_each_others_room_both_end() -> None:
    world = fuzzy_world(pool_tokens=400)
    world.run(request("donor", wrapped(1, DOCUMENT), 1))
    asked = [request(f"r{at}", wrapped(2 + at, DOCUMENT), 200) for at in range(2)]
    world.run(*asked)
    assert world.engine.snapshot().preemptions > 0
    for each in asked:
        assert world.ids(each.rid) == oracle_answer(each.prompt_ids, 200)
    world.assert_idle()


def test_a_donor_is_read_while_unrelated_prompts_flood_the_pool() -> None:
    world = fuzzy_world(pool_tokens=640)
    world.run(request("donor", wrapped(1, DOCUMENT), 1))
    world.engine.add(request("reader", wrapped(2, DOCUMENT), 150))
    while not world.answers["reader", 0].token_ids:
        world.step()
    evicted = world.engine.cache.inspector.stats().evicted_pages
    for at in range(12):
        world.engine.add(request(f"other{at}", prompt(100, 50 + at), 3))
    world.run()
    assert world.engine.cache.inspector.stats().evicted_pages > evicted
    assert world.ids("reader") == oracle_answer(wrapped(2, DOCUMENT), 150)
    assert shared_tokens(world, "reader") > 100
    world.assert_idle()


def test_a_reader_that_is_aborted_lets_its_donor_go() -> None:
    world = fuzzy_world(pool_tokens=640)
    world.run(request("donor", wrapped(1, DOCUMENT), 1))
    before = world.engine.snapshot().evictable_tokens
    world.engine.add(request("reader", wrapped(2, DOCUMENT), 150))
    while not world.answers["reader", 0].token_ids:
        world.step()
    assert world.engine.snapshot().evictable_tokens < before - 100
    with pytest.raises(Exception, match="cannot be flushed"):
        world.engine.flush_cache()
    world.engine.abort("reader")
    world.step()
    world.assert_idle()
    assert world.engine.snapshot().evictable_tokens >= before


def test_drafts_are_verified_over_shared_spans() -> None:
    world = fuzzy_world(speculative=SpeculativeConfig(algorithm="NGRAM"))
    world.run(request("donor", wrapped(1, DOCUMENT), 1))
    tokens = wrapped(2, DOCUMENT)
    answer = oracle_answer(tokens, 40)
    # What the answer will say stands in the cache: drafts are proposed, and accepted.
    world.run(request("said", tokens + answer, 1, fuzzy=False))
    world.engine.cache.evict(0)
    other = wrapped(3, DOCUMENT)
    world.run(request("moved", other, 40))
    assert world.ids("moved") == oracle_answer(other, 40)
    assert shared_tokens(world, "moved") > 90


@pytest.mark.parametrize("seed", range(3))
def test_random_lives_in_sessions_with_drafts(
    seed: int, donors_of_any_length_are_shared: None
) -> None:
    rng = np.random.default_rng([seed, 9])
    world = fuzzy_world(
        page_size=(1, 4, 16)[seed],
        pool_tokens=int(rng.choice([480, 960])),
        chunked_prefill_size=int(rng.choice([7, 64])),
        share_span=4,
        speculative=SpeculativeConfig(algorithm="NGRAM"),
    )

    def of_a_session(rng: np.random.Generator, rid: str):
        made = overlapping_request(rng, rid)
        object.__setattr__(made, "session", str(rng.choice(["s", "t"])))
        return made

    requests = random_life(world, rng, 120, of_a_session)
    assert_answers(world, requests, False)
    assert world.runner.shared > 1000
