"""Sessions on the engine: a conversation behind a head that changes every turn."""

from __future__ import annotations

import pytest

from support.enginekit import World, oracle_answer, prompt, request
from support.movedkit import DOCUMENT, fuzzy_world


def converse(world: World, turns: int, session: str | None, salt: str | None = None) -> list[list]:
    """The spans of every turn's plan; each answer is right."""
    history, plans = list(DOCUMENT), []
    for turn in range(1, turns + 1):
        history += prompt(20, 50 + turn)
        tokens = prompt(5 + turn, 900 + turn) + history
        rid = f"{session}-{salt}-{turn}"
        world.run(request(rid, tokens, 12, session=session, salt=salt))
        assert world.ids(rid) == oracle_answer(tokens, 12)
        history += world.ids(rid)
        plans.append(list(world.answers[rid, 0].plan or ()))
    return plans


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_what_a_session_computed_behind_moved_text_serves_its_later_turns(page_size):
    world = fuzzy_world(page_size)
    plans = converse(world, 6, "s")
    for turn, plan in enumerate(plans, 1):
        usage = world.answers[f"s-None-{turn}", 0].usage
        approximate = sum(span.length for span in plan if span.generation)
        assert (usage.reuse.session > 0) == (turn > 2), "what turn 2 computed is lent to turn 3"
        assert approximate - usage.refreshed_tokens <= usage.reuse.session <= approximate
    assert plans[0] == [], "the first turn is exact"
    assert all(span.generation == 0 for span in plans[1]), "the document comes from the tree"
    for turn in range(2, 6):
        lent = [span for span in plans[turn] if span.generation]
        assert lent, f"turn {turn + 1} computes again what turn {turn} had computed"
        assert max(span.generation for span in lent) <= turn - 1
        served = sum(span.length for span in plans[turn])
        # All but the head, this turn's text, and less than a page at either end of a span.
        assert served >= 120 + 32 * turn - 2 * page_size * len(plans[turn]) - 8
    world.assert_idle()


def test_without_a_key_only_exact_text_is_lent():
    world = fuzzy_world()
    plans = converse(world, 4, None)
    assert all(span.generation == 0 for plan in plans for span in plan)
    world.assert_idle()


def test_sessions_and_salts_do_not_see_each_other():
    world = fuzzy_world()
    converse(world, 3, "s")
    for other, salt in (("t", None), ("s", "tenant")):
        alone, beside = fuzzy_world(), world
        expected = converse(alone, 3, other, salt)
        found = converse(beside, 3, other, salt)
        lent = [[span.start for span in plan if span.generation] for plan in found]
        assert lent == [[span.start for span in plan if span.generation] for plan in expected]


def test_a_closed_session_is_forgotten_and_its_pages_are_free():
    world = fuzzy_world()
    converse(world, 3, "s")
    cache = world.engine.cache
    before = cache.cached_pages
    assert world.engine.close_session("t") == 0
    assert world.engine.close_session("s", "salt") == 0
    tokens = world.engine.close_session("s")
    assert tokens > 0
    assert cache.cached_pages < before
    assert world.engine.close_session("s") == 0
    world.assert_idle()
    world.engine.flush_cache()
    assert cache.pool.num_free == cache.pool.num_pages


def test_an_aborted_turn_leaves_nothing_to_its_session():
    world = fuzzy_world()
    converse(world, 1, "s")
    world.engine.add(request("gone", prompt(9, 5) + DOCUMENT + prompt(20, 6), 50, session="s"))
    for _ in range(4):
        world.engine.step()
    world.engine.abort("gone")
    assert world.engine.close_session("s") == 0
    world.assert_idle()
