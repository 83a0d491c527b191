"""Faults of the field: who is served when, and from which memory."""

from __future__ import annotations

import pytest

from support.enginekit import EXACT_BACKENDS, make_world, oracle_answer, prompt, request


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_memory_of_finished_requests_is_reclaimed_before_a_new_one_is_refused(backend):
    world = make_world(backend, pool_tokens=64)
    for i in range(6):
        tokens = prompt(50, i)
        world.run(request(f"r{i}", tokens, 4))
        assert world.ids(f"r{i}") == oracle_answer(tokens, 4)
    assert world.engine.snapshot().preemptions == 0


def test_lpm_prefers_the_longest_cached_prefix():
    world = make_world("radix", schedule_policy="lpm", max_running_requests=1)
    warm = prompt(40, 1)
    world.run(request("warm", warm, 1))
    world.engine.add(request("running", prompt(8, 2), 3))
    world.step()
    world.engine.add(request("cold", prompt(40, 3), 1))
    world.engine.add(request("hit", prompt(44, 4, warm), 1))
    world.run()
    ended = [delta.rid for delta in world.deltas if delta.finish_reason]
    assert ended == ["warm", "running", "hit", "cold"]


def test_lpm_never_starves_a_request_with_no_match():
    """Fresh hits keep arriving for ever; the one without a match is served all the same."""
    world = make_world("radix", schedule_policy="lpm", max_running_requests=2)
    warm = prompt(40, 1)
    world.run(request("warm", warm, 1))
    for i in range(3):
        world.engine.add(request(f"hit-first-{i}", prompt(44, i, warm), 2))
    world.engine.add(request("cold", prompt(40, 3), 1))
    for i in range(400):
        world.engine.add(request(f"hit-{i}", prompt(44, 100 + i, warm), 2))
        world.step()
        if world.answers["cold", 0].finish_reason:
            break
    else:
        raise AssertionError("starved")
    overtaken = sum(1 for d in world.deltas if d.finish_reason and d.rid.startswith("hit-"))
    assert 10 < overtaken < 100, "it is passed over by many, but not by all"


def test_larger_priorities_run_earlier_and_are_preempted_later():
    world = make_world("radix", max_running_requests=1)
    world.engine.add(request("running", prompt(8, 0), 3))
    world.step()
    for rid, priority in (("low", -1), ("plain", 0), ("high", 5), ("high2", 5)):
        world.engine.add(request(rid, prompt(8, 9 + priority), 1, priority=priority))
    world.run()
    ended = [delta.rid for delta in world.deltas if delta.finish_reason]
    assert ended == ["running", "high", "high2", "plain", "low"]


@pytest.mark.parametrize(
    ("backend", "wait", "prefilled"),
    [("none", True, 6272), ("hash", True, 6272), ("radix", True, 512), ("radix", False, 6272)],
)
def test_a_shared_cold_prefix_is_prefilled_once_in_one_batch(backend, wait, prefilled):
    """16 prompts of 392 tokens sharing 384, page 128, all of which fit one step."""
    world = make_world(
        backend, page_size=128, pool_tokens=128 * 80, chunked_prefill_size=8192, wait=wait
    )
    shared = prompt(384, 1)
    requests = [request(f"r{i}", prompt(392, 10 + i, shared), 4) for i in range(16)]
    world.run(*requests)
    assert world.engine.snapshot().prefill_tokens == prefilled
    for each in requests:
        assert world.ids(each.rid) == oracle_answer(each.prompt_ids, 4)


def test_the_group_follows_its_producer_chunk_by_chunk():
    world = make_world("radix", page_size=4, chunked_prefill_size=16)
    shared = prompt(64, 1)
    requests = [request(f"r{i}", prompt(66, 10 + i, shared), 2) for i in range(4)]
    world.run(*requests)
    assert world.engine.snapshot().prefill_tokens == 66 + 3 * 2


def test_others_pass_a_request_that_waits_for_its_producer():
    world = make_world("radix", page_size=4, chunked_prefill_size=40)
    shared = prompt(60, 1)
    world.engine.add(request("producer", prompt(62, 2, shared), 1))
    world.engine.add(request("follower", prompt(62, 3, shared), 1))
    world.engine.add(request("other", prompt(4, 4), 1))
    world.run()
    # Two steps of the producer, the second with room for four more tokens; then the follower.
    assert world.runner.batches == [40, 22 + 4, 2]
    assert [delta.rid for delta in world.deltas] == ["producer", "other", "follower"]


@pytest.mark.parametrize("death", ["abort", "error"])
def test_if_the_producer_dies_the_next_takes_over(death):
    world = make_world("radix", page_size=4, chunked_prefill_size=16)
    shared = prompt(64, 1)
    requests = [request(f"r{i}", prompt(66, 10 + i, shared), 2) for i in range(3)]
    for each in requests:
        world.engine.add(each)
    world.step()
    assert [s.group.request.rid for s in world.engine.scheduler.running] == ["r0"]
    if death == "abort":
        world.engine.abort("r0")
    else:
        world.runner.before = lambda batch: 1 / 0
        world.step()
        world.runner.before = lambda batch: None
    world.run()
    for each in requests[1:]:
        assert world.ids(each.rid) == oracle_answer(each.prompt_ids, 2)
    # The second computed what the first had not published; the third followed the second.
    assert world.engine.snapshot().prefill_tokens <= 66 + 66 + 2 + 16


def test_a_producer_that_never_publishes_is_not_waited_for_for_ever():
    world = make_world("radix", page_size=4)
    world.engine.cache.pending_prefix = lambda view, matched: len(view.tokens)
    world.engine.add(request("runs", prompt(8, 1), None))
    world.engine.add(request("waits", prompt(8, 2), 1))
    for _ in range(300):
        world.step()
        if world.answers["waits", 0].finish_reason:
            return
    raise AssertionError("starved")


def test_prompts_wait_while_decodes_fill_the_budget():
    world = make_world("radix", chunked_prefill_size=2, max_running_requests=8)
    requests = [request(f"r{i}", prompt(3, i), 30) for i in range(5)]
    world.run(*requests)
    for each in requests:
        assert world.ids(each.rid) == oracle_answer(each.prompt_ids, 30)
    assert max(world.runner.batches) <= 2
