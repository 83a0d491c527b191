"""Faults of the field: pages that leak, duplicates that converge under a running request."""

from __future__ import annotations

import pytest

from support.enginekit import (
    EXACT_BACKENDS,
    SHARING_BACKENDS,
    make_world,
    oracle_answer,
    prompt,
    request,
)


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [3, 64])
def test_an_idle_engine_owns_no_request_pages(backend, page_size, chunk):
    world = make_world(backend, page_size=page_size, chunked_prefill_size=chunk)
    shared = prompt(40, 1)
    for round_ in range(3):
        requests = [request(f"{round_}-{i}", prompt(50 + i, i, shared), 5) for i in range(5)]
        for each in requests:
            world.engine.add(each)
        world.step()
        world.engine.abort(f"{round_}-1")
        world.step()

        def fail(batch):
            raise RuntimeError("injected")

        if round_ == 1:
            world.runner.before = fail
            world.step()
            world.runner.before = lambda batch: None
        world.run()
        world.assert_idle()


@pytest.mark.parametrize("backend", SHARING_BACKENDS)
def test_a_converged_duplicate_is_read_from_the_caches_page(backend):
    """Two that compute the same in one step: one's pages are freed (and poisoned) at once."""
    world = make_world(backend, wait=False)
    tokens = prompt(40, 1)
    world.engine.add(request("a", tokens, 12))
    world.engine.add(request("b", tokens, 12))
    world.step()
    first, second = (sequence.lease for sequence in world.engine.scheduler.running)
    assert first.pages[:9].tolist() == second.pages[:9].tolist()
    world.run()
    assert world.ids("a") == world.ids("b") == oracle_answer(tokens, 12)
    assert world.engine.cache.counters.converged_pages > 0
    world.assert_idle()


def test_one_that_started_later_converges_while_it_decodes():
    """Outputs are equal too, so the follower's own pages are replaced page after page."""
    world = make_world("radix", page_size=2)
    tokens = prompt(21, 1)
    world.engine.add(request("first", tokens, 30))
    for _ in range(4):
        world.step()
    world.run(request("second", tokens, 30))
    assert world.ids("first") == world.ids("second") == oracle_answer(tokens, 30)
    # Both end on the same pages: nothing is kept twice.
    assert world.engine.snapshot().cached_tokens <= len(tokens) + 30
