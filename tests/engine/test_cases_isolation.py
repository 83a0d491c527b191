"""Faults of the field: what one tenant's text does for another's."""

from __future__ import annotations

import pytest

from support.enginekit import SHARING_BACKENDS, make_world, oracle_answer, prompt, request


@pytest.mark.parametrize("backend", SHARING_BACKENDS)
def test_salts_hit_within_and_miss_across(backend):
    world = make_world(backend)
    tokens = prompt(32, 1)
    salts = [None, "", "a", "b"]
    for salt in salts:
        world.run(request(f"cold {salt!r}", tokens, 2, salt=salt))
        assert world.answers[f"cold {salt!r}", 0].usage.cached_tokens == 0
    for salt in salts:
        world.run(request(f"warm {salt!r}", tokens, 2, salt=salt))
        assert world.answers[f"warm {salt!r}", 0].usage.cached_tokens == 28
        assert world.ids(f"warm {salt!r}") == oracle_answer(tokens, 2)


def test_nobody_waits_for_a_producer_of_another_salt():
    world = make_world("radix", chunked_prefill_size=64)
    shared = prompt(32, 1)
    for salt in ("a", "b"):
        world.engine.add(request(salt, prompt(34, 2, shared), 2, salt=salt))
    world.step()
    assert len(world.engine.scheduler.running) == 2
