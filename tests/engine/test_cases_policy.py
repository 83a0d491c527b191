"""Faults of the field: who is served when, and from which memory."""

from __future__ import annotations

import numpy as np
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
    assert ended == ["high", "high2", "running", "plain", "low"]
    assert world.engine.snapshot().preemptions == 1


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_a_higher_priority_preempts_the_lowest_when_all_places_are_taken(backend):
    world = make_world(backend, max_running_requests=2)
    asked = [request(f"p{at}", prompt(20, at), 40, priority=at) for at in range(2)]
    for each in asked:
        world.engine.add(each)
    world.step()
    asked.append(request("urgent", prompt(20, 9), 5, priority=10))
    world.engine.add(asked[-1])
    for _ in range(6):
        world.step()
    assert world.answers["urgent", 0].finish_reason == "length"
    assert len(world.answers["p1", 0].token_ids) == 7, "only the lowest made way"
    world.run()
    for each in asked:
        assert world.ids(each.rid) == oracle_answer(each.prompt_ids, each.sampling.max_tokens)
    assert world.engine.snapshot().preemptions == 1
    world.assert_idle()


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_a_higher_priority_preempts_lower_ones_when_the_pool_is_full(backend):
    world = make_world(backend, pool_tokens=128)
    asked = [request(f"low{at}", prompt(20, at), 40) for at in range(2)]
    for each in asked:
        world.engine.add(each)
    for _ in range(30):
        world.step()
    asked.append(request("urgent", prompt(60, 9), 5, priority=1))
    world.engine.add(asked[-1])
    for _ in range(6):
        world.step()
    assert world.answers["urgent", 0].finish_reason == "length"
    world.run()
    for each in asked:
        assert world.ids(each.rid) == oracle_answer(each.prompt_ids, each.sampling.max_tokens)
    world.assert_idle()


def test_a_higher_priority_is_not_delayed_by_the_long_prompts_of_lower_ones():
    world = make_world("radix", chunked_prefill_size=16, pool_tokens=4096)
    asked = [request(f"low{at}", prompt(400, at), 1) for at in range(4)]
    for each in asked:
        world.engine.add(each)
    world.step()
    world.engine.add(request("urgent", prompt(20, 9), 1, priority=1))
    world.step()
    world.step()
    assert world.answers["urgent", 0].finish_reason == "length"
    assert world.engine.snapshot().preemptions == 0, "places and room are there"


def test_nothing_is_preempted_where_that_would_not_make_enough_room():
    world = make_world("radix", pool_tokens=128)
    world.engine.add(request("large", prompt(90, 1), 20, priority=5))
    world.step()
    world.engine.add(request("low", prompt(8, 2), 10))
    world.step()
    world.engine.add(request("high", prompt(60, 3), 3, priority=1))
    world.run()
    ended = [delta.rid for delta in world.deltas if delta.finish_reason]
    assert ended.index("low") < ended.index("high")
    assert world.engine.snapshot().preemptions == 0


def test_equal_priorities_do_not_preempt_each_other_for_a_place():
    world = make_world("radix", max_running_requests=1)
    asked = [request(f"r{at}", prompt(9, at), 6, priority=3) for at in range(5)]
    world.run(*asked)
    ended = [delta.rid for delta in world.deltas if delta.finish_reason]
    assert ended == [each.rid for each in asked]
    assert world.engine.snapshot().preemptions == 0


@pytest.mark.parametrize("seed", range(4))
def test_many_priorities_in_few_places_all_come_to_an_end(seed):
    rng = np.random.default_rng(seed)
    world = make_world("radix", max_running_requests=2, pool_tokens=256, chunked_prefill_size=16)
    asked = [
        request(f"r{at}", prompt(int(rng.integers(1, 60)), at), 20, priority=int(rng.integers(5)))
        for at in range(30)
    ]
    for each in asked:
        world.engine.add(each)
        for _ in range(int(rng.integers(0, 6))):
            world.step()
    world.run(limit=3000)
    for each in asked:
        assert world.ids(each.rid) == oracle_answer(each.prompt_ids, 20)
    world.assert_idle()


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
