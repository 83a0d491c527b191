"""KV on disk: what an engine computed serves the next process, and never wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.enginekit import SHARING_BACKENDS, oracle_answer, prompt, request
from support.storekit import settle, stored_world

BACKENDS = (*SHARING_BACKENDS, "fuzzy_match")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prefix_is_served_after_a_restart(tmp_path: Path, backend: str):
    text = prompt(90, seed=1)
    first = stored_world(tmp_path, backend)
    first.run(request("a", text))
    first.engine.close()

    second = stored_world(tmp_path, backend)
    second.run(request("b", text[:80] + prompt(20, seed=2)))
    answer = second.answers["b", 0]
    assert answer.usage.cached_tokens == 80
    assert answer.token_ids == oracle_answer(text[:80] + prompt(20, seed=2), 8)
    assert second.runner.prefilled <= 20
    second.assert_idle()
    second.engine.close()


def test_moved_text_is_served_after_a_restart(tmp_path: Path):
    document = prompt(64, seed=1)
    first = stored_world(tmp_path, "fuzzy_match")
    first.run(request("a", prompt(9, seed=2) + document + prompt(5, seed=3)))
    first.engine.close()

    second = stored_world(tmp_path, "fuzzy_match")
    moved = prompt(17, seed=4) + document + prompt(6, seed=5)
    second.run(request("b", moved))
    assert second.answers["b", 0].usage.moved_tokens >= 60
    assert second.ids("b") == oracle_answer(moved, 8)
    second.assert_idle()
    second.engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_evicted_is_read_back(tmp_path: Path, backend: str):
    world = stored_world(tmp_path, backend, pool_tokens=256)
    text = prompt(90, seed=1)
    world.run(request("a", text))
    settle(world)
    for seed in range(2, 6):
        world.run(request(f"other{seed}", prompt(100, seed=seed)))
        settle(world)
    assert world.engine.cache.match(world_view(world, text)) == 0
    world.run(request("again", text))
    assert world.answers["again", 0].usage.cached_tokens == 88
    assert world.ids("again") == world.ids("a")
    world.assert_idle()
    world.engine.close()


def world_view(world, tokens):
    import numpy as np

    from kvweave.prefix.lease import RequestView

    return RequestView("look", np.array(tokens, np.int32), world.engine.namespace(None))
