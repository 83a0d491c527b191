"""The scheduler by itself: admission, ageing, what one step holds."""

from __future__ import annotations

import numpy as np

from kvweave.engine.scheduler.admission import PATIENCE, WaitingQueue
from kvweave.engine.scheduler.request import RequestGroup, Sequence
from kvweave.engine.types import GenerateRequest
from kvweave.prefix.lease import Namespace
from support.enginekit import make_world, oracle_answer, prompt, request


def sequence(arrival: int, priority: int = 0) -> Sequence:
    asked = GenerateRequest(rid=f"r{arrival}", prompt_ids=(1,), priority=priority)
    tokens = np.array([1], np.int32)
    return Sequence(RequestGroup(asked, Namespace("m")), 0, arrival, tokens, limit=9)


def order(queue: WaitingQueue, matches: dict[int, int]) -> list[int]:
    return [s.arrival for s, _ in queue.candidates(lambda s: matches.get(s.arrival, 0))]


def test_fcfs_is_by_priority_then_arrival():
    queue = WaitingQueue("fcfs")
    for arrival, priority in ((3, 0), (1, 0), (2, 5), (4, -1), (0, 0)):
        queue.add(sequence(arrival, priority))
    assert order(queue, {3: 100}) == [2, 0, 1, 3, 4]


def test_lpm_is_by_match_within_a_priority_until_someone_is_overdue():
    queue = WaitingQueue("lpm")
    items = {arrival: sequence(arrival, 5 * (arrival == 2)) for arrival in range(4)}
    for item in items.values():
        queue.add(item)
    assert order(queue, {3: 8, 1: 4}) == [2, 3, 1, 0]
    queue.admissions += PATIENCE
    assert order(queue, {3: 8, 1: 4}) == [2, 0, 3, 1], "the first has waited long enough"
    late = sequence(9)
    queue.add(late)
    assert order(queue, {9: 99}) == [2, 0, 9, 1, 3]


def test_waiting_again_does_not_lose_ones_claim():
    queue = WaitingQueue("lpm")
    first = sequence(0)
    queue.add(first)
    queue.admissions += PATIENCE
    queue.remove(first)
    queue.add(first)
    queue.add(sequence(1))
    assert order(queue, {1: 50}) == [0, 1]


def test_decodes_and_chunks_share_a_step_and_its_budget():
    world = make_world("radix", chunked_prefill_size=16)
    world.engine.add(request("decodes", prompt(8, 1), 20))
    world.step()
    world.engine.add(request("long", prompt(40, 2), 2))
    for _ in range(4):
        world.step()
    assert world.runner.batches == [8, 16, 16, 11, 2]


def test_a_large_request_is_not_passed_by_smaller_ones_for_lack_of_room():
    world = make_world("none", pool_tokens=128)
    world.engine.add(request("running", prompt(60, 1), 20))
    world.step()
    world.engine.add(request("large", prompt(90, 2), 2))
    for i in range(6):
        world.engine.add(request(f"small{i}", prompt(8, 3 + i), 2))
    world.run()
    ended = [delta.rid for delta in world.deltas if delta.finish_reason]
    assert ended[:2] == ["running", "large"]


def test_admission_leaves_room_for_what_running_answers_will_say():
    """Twelve answers that would all fit at first, but not with what they generate."""
    world = make_world("none", pool_tokens=512, page_size=1, max_running_requests=64)
    requests = [request(f"r{i}", prompt(30, i), 60) for i in range(12)]
    world.run(*requests)
    for each in requests:
        assert world.ids(each.rid) == oracle_answer(each.prompt_ids, 60)
    wasted = world.engine.snapshot().prefill_tokens - 12 * 30
    assert wasted < 12 * 30, "recomputation stays below the work itself"
    assert world.peak_running > 4, "and memory does not stay idle"


def test_a_match_that_was_only_others_memory_is_leased_once_and_given_back():
    """Its cached pages count as room until it locks them; then there is too little for the rest."""
    world = make_world("radix", pool_tokens=96)
    warm = prompt(40, 1)
    world.run(request("warm", warm, 1))
    leased = []
    lease = world.engine.cache.lease
    world.engine.cache.lease = lambda view: leased.append(view.rid) or lease(view)
    world.engine.add(request("running", prompt(36, 2), 12))
    world.step()
    world.engine.add(request("hit", prompt(60, 3, warm), 4))
    for _ in range(6):
        world.step()
        assert [s.group.request.rid for s in world.engine.scheduler.running] == ["running"]
    assert leased == ["running", "hit"]
    assert world.engine.snapshot().evictable_tokens >= 36, "unlocked again"
    world.run()
    assert world.ids("hit") == oracle_answer(prompt(60, 3, warm), 4)


def test_running_requests_and_pages_are_bounded():
    world = make_world("radix", max_running_requests=3)
    world.run(*(request(f"r{i}", prompt(10, i), 5) for i in range(9)))
    assert world.peak_running == 3


def test_a_decode_that_completes_no_page_does_not_reach_the_cache():
    world = make_world("radix", page_size=16)
    published = []
    publish = world.engine.cache.publish

    def count(lease, tokens, computed):
        published.append(computed)
        publish(lease, tokens, computed)

    world.engine.cache.publish = count
    world.run(request("r", prompt(20, 1), 40))
    assert published == [20, 32, 48]
