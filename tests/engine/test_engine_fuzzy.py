"""The engine over moved text, with KV that can be read: every token is known to be in its place."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from kvweave.errors import RequestError
from kvweave.fuzzy.backend import FuzzyCache
from kvweave.kv.pool import PagePool
from kvweave.prefix.contract import CacheOptions
from support.enginekit import (
    Faults,
    World,
    assert_answers,
    make_world,
    oracle_answer,
    prompt,
    random_life,
    request,
)
from support.movedkit import DOCUMENT, SMALL, fuzzy_world, overlapping_request, wrapped


def fuzzy_world_recomputing(share: float, strategy: str = "mix", **options) -> World:
    config = replace(SMALL, refresh=share, refresh_strategy=strategy)

    def make_cache(pool: PagePool, given: CacheOptions, mover) -> FuzzyCache:
        return FuzzyCache(pool, replace(given, fuzzy=config), mover)

    return make_world(make_cache=make_cache, page_size=4, **options)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [7, 2048])
def test_a_moved_document_is_not_computed_again_and_answers_are_right(page_size, chunk):
    world = fuzzy_world(page_size, chunked_prefill_size=chunk)
    world.run(request("donor", wrapped(1, DOCUMENT)))
    before = world.engine.snapshot().prefill_tokens
    tokens = wrapped(2, DOCUMENT)
    world.run(request("moved", tokens, 6))
    assert world.ids("moved") == oracle_answer(tokens, 6)
    usage = world.answers["moved", 0].usage
    assert (usage.cached_tokens, usage.refreshed_tokens) == (0, 0)
    assert usage.moved_tokens > 120 - page_size
    assert world.engine.snapshot().prefill_tokens - before == len(tokens) - usage.moved_tokens
    assert sum(span.length for span in world.answers["moved", 0].plan) == usage.moved_tokens
    world.assert_idle()


def test_passages_of_many_donors_in_another_order_behind_an_exact_prefix():
    world = fuzzy_world()
    passages = [prompt(40, seed) for seed in range(10, 16)]
    head = prompt(24, 5)
    world.run(request("head", head + prompt(9, 6)))
    for at, passage in enumerate(passages):
        world.run(request(f"donor{at}", wrapped(at, passage)))
    order = [passages[at] for at in (4, 1, 5, 0, 0, 3)]
    tokens = head + wrapped(9, *order)
    world.run(request("all", tokens, 6))
    answer = world.answers["all", 0]
    assert world.ids("all") == oracle_answer(tokens, 6)
    assert answer.usage.cached_tokens == 24
    assert len({span.donor for span in answer.plan}) == 5
    assert answer.usage.moved_tokens > 6 * 36


def test_the_same_text_at_once_is_computed_once_wherever_it_stands():
    """Five headers before one document: four requests wait for the first to publish it."""
    world = fuzzy_world()
    asked = [request(f"r{at}", wrapped(at, DOCUMENT), 5) for at in range(5)]
    world.run(*asked)
    for each in asked:
        assert world.ids(each.rid) == oracle_answer(each.prompt_ids, 5)
    everything = sum(len(each.prompt_ids) for each in asked)
    assert world.engine.snapshot().prefill_tokens < everything - 4 * 110
    assert world.peak_running > 1
    world.assert_idle()

    impatient = fuzzy_world(wait=False)
    impatient.run(*asked)
    assert impatient.engine.snapshot().prefill_tokens == everything


def test_when_the_producer_is_aborted_the_waiting_go_on():
    world = fuzzy_world(chunked_prefill_size=16)
    asked = [request(f"r{at}", wrapped(at, DOCUMENT), 5) for at in range(3)]
    for each in asked:
        world.engine.add(each)
    world.step()
    assert [each.group.request.rid for each in world.engine.scheduler.running] == ["r0"]
    world.engine.abort("r0")
    world.run()
    for each in asked[1:]:
        assert world.ids(each.rid) == oracle_answer(each.prompt_ids, 5)
    world.assert_idle()


def test_what_was_answered_approximately_is_no_donor_and_the_next_gets_exact_kv_only():
    world = fuzzy_world()
    world.run(request("donor", wrapped(1, DOCUMENT)))
    cached = world.engine.snapshot().cached_tokens
    tokens = wrapped(2, DOCUMENT)
    for rid in ("first", "second"):
        world.run(request(rid, tokens, 30))
        # Five to ten tokens of header are all that is exact.
        assert world.answers[rid, 0].usage.cached_tokens <= 8
        assert world.engine.snapshot().cached_tokens <= cached + 8
    world.run(request("exact", tokens, 6, fuzzy=False))
    assert world.answers["exact", 0].usage.moved_tokens == 0
    world.run(request("healed", tokens, 6))
    assert world.answers["healed", 0].usage.cached_tokens >= len(tokens) - 8
    assert world.answers["healed", 0].plan == ()


def test_prompt_logprobs_are_computed_from_exact_kv():
    world = fuzzy_world()
    world.run(request("donor", wrapped(1, DOCUMENT)))
    tokens = wrapped(2, DOCUMENT)
    world.run(request("scored", tokens, 3, prompt_logprobs=1))
    assert world.answers["scored", 0].usage.moved_tokens == 0
    assert len(world.answers["scored", 0].prompt_logprobs) == len(tokens)


def test_a_preempted_request_comes_back_with_a_plan_for_its_output_too():
    world = fuzzy_world(pool_tokens=360, chunked_prefill_size=64)
    asked = [request(f"r{at}", wrapped(at, DOCUMENT), 90) for at in range(3)]
    world.run(*asked)
    assert world.engine.snapshot().preemptions > 0
    for each in asked:
        assert world.ids(each.rid) == oracle_answer(each.prompt_ids, 90)
    world.assert_idle()


def test_who_was_told_to_be_exact_does_not_come_back_as_anything_else():
    world = fuzzy_world(max_running_requests=1)
    exact = request("exact", wrapped(1, DOCUMENT), 30)
    world.engine.add(exact)
    while not world.answers["exact", 0].token_ids:
        world.step()
    scheduler, cache = world.engine.scheduler, world.engine.cache
    scheduler._preempt(scheduler.running[0])
    cache.evict(cache.cached_pages)
    # Its text comes to stand elsewhere before it comes back.
    world.engine.add(request("donor", wrapped(2, DOCUMENT), 3, priority=1))
    plans = plans_of(world)
    world.run()
    assert plans == [("donor", False), ("exact", False)]
    assert world.answers["exact", 0].usage.moved_tokens == 0
    assert world.ids("exact") == oracle_answer(exact.prompt_ids, 30)
    world.run(request("moved", wrapped(3, DOCUMENT), 3))
    assert plans[-1] == ("moved", True)


def plans_of(world: World) -> list[tuple[str, bool]]:
    """Every lease from now on: the request and whether its plan is approximate."""
    lend, plans = world.engine.cache.lease, []

    def lent(view):
        lease = lend(view)
        plans.append((view.rid, lease.plan.approximate))
        return lease

    world.engine.cache.lease = lent
    return plans


def test_all_answers_of_a_request_that_counts_as_exact_are_exact():
    """The text repeats itself: the second answer could be served from a page of the first."""
    world = fuzzy_world(128)
    plans = plans_of(world)
    text = prompt(128, 3)
    tokens = text + text[10:110]
    world.run(request("r", tokens, 8, n=3))
    assert plans == [("r", False)] * 3
    for index in range(3):
        assert world.ids("r", index) == oracle_answer(tokens, 8)
        assert world.answers["r", index].plan == ()
        assert world.answers["r", index].usage.moved_tokens == 0


@pytest.mark.parametrize("preempted", [False, True])
def test_answers_of_an_exact_request_stay_exact_after_eviction_and_preemption(preempted):
    world = fuzzy_world(16, max_running_requests=1)
    tokens = wrapped(1, DOCUMENT)
    world.engine.add(request("r", tokens, 20, n=2))
    scheduler, cache = world.engine.scheduler, world.engine.cache
    while not world.answers["r", 0].finish_reason:
        world.step()
    if preempted:
        while not world.answers["r", 1].token_ids:
            world.step()
        scheduler._preempt(scheduler.running[0])
    plans = plans_of(world)
    cache.evict(cache.cached_pages)
    # The same text comes to stand elsewhere before the second answer is admitted.
    world.engine.add(request("donor", wrapped(2, DOCUMENT), 3, priority=1))
    world.run()
    assert plans == [("donor", False), ("r", False)]
    for index in range(2):
        assert world.ids("r", index) == oracle_answer(tokens, 20)


@pytest.mark.parametrize("seed", range(8))
def test_random_lives_over_overlapping_text_answer_right(seed, donors_of_any_length_are_shared):
    rng, share_span = np.random.default_rng(seed), (1, 0, 4)[seed % 3]
    world = fuzzy_world(
        page_size=int((1, 4, 16)[seed % 3]),
        pool_tokens=int(rng.choice([320, 640, 1280])),
        eviction=str(rng.choice(["lru", "lfu", "slru", "priority"])),
        chunked_prefill_size=int(rng.choice([7, 32, 256])),
        max_running_requests=int(rng.choice([1, 3, 8])),
        schedule_policy=str(rng.choice(["fcfs", "lpm"])),
        max_queued_requests=12,
        share_span=share_span,
    )
    faults = seed % 2 == 0
    world.runner.before = Faults(rng, 0.05 if faults else 0.0)
    copies = world.runner.move

    def sometimes(runs):
        if rng.random() < 0.1:
            raise MemoryError("no room for the copy")
        copies(runs)

    world.runner.move = sometimes
    requests = random_life(world, rng, 200, overlapping_request)
    assert_answers(world, requests, faults)
    assert world.engine.snapshot().hit_tokens["moved"] > 80
    assert (world.runner.shared > 100) == bool(share_span)
    world.engine.flush_cache()
    assert world.engine.snapshot().free_tokens == world.engine.snapshot().total_tokens


def test_a_snapshot_which_every_step_takes_tells_of_the_provider_and_asks_it_nothing():
    world = fuzzy_world()
    with patch("kvweave.fuzzy.anchors.SpanIndex.stats", return_value={"anchors": 5}) as stats:
        world.run(request("r", wrapped(1, DOCUMENT)))
        world.run(request("s", wrapped(2, DOCUMENT)))
        for _ in range(3):
            seen = world.engine.snapshot()
    # Once, when it was asked for donors; and not again within a second.
    stats.assert_called_once()
    assert seen.provider_events["asked"] == 2
    assert seen.provider_events["proposed"] >= 1
    assert seen.provider_figures == {"anchors": 5.0}


@pytest.mark.parametrize("strategy", ["mix", "deviation", "seams"])
@pytest.mark.parametrize("chunk", [7, 64, 2048])
def test_a_share_of_what_is_moved_is_computed_again(strategy, chunk):
    world = fuzzy_world_recomputing(0.25, strategy, chunked_prefill_size=chunk)
    world.run(request("donor", wrapped(1, DOCUMENT)))
    before = world.engine.snapshot().prefill_tokens
    budgets = []
    world.runner.before = lambda batch: budgets.append(
        0 if batch.recompute is None else int(batch.recompute.budget.sum())
    )
    tokens = wrapped(2, DOCUMENT)
    world.run(request("moved", tokens, 6))
    assert world.ids("moved") == oracle_answer(tokens, 6)
    usage, plan = world.answers["moved", 0].usage, world.answers["moved", 0].plan
    served = sum(span.length for span in plan)
    assert usage.refreshed_tokens == round(0.25 * served)
    assert usage.moved_tokens == served - usage.refreshed_tokens
    # However the prompt is cut into chunks, what they may choose adds up.
    assert sum(budgets) == (0 if strategy == "seams" else usage.refreshed_tokens)
    # Nor does anyone count a token twice.
    now = world.engine.snapshot()
    assert now.hit_tokens["moved"] == usage.moved_tokens
    assert now.prefill_tokens - before == len(tokens) - usage.moved_tokens
    world.assert_idle()


def test_a_request_may_want_another_share_than_the_engine_is_set_to():
    world = fuzzy_world_recomputing(0.25)
    world.run(request("donor", wrapped(1, DOCUMENT)))
    shares = []
    for at, share in enumerate((None, 0.0, 0.5)):
        world.run(replace(request(f"r{at}", wrapped(2 + at, DOCUMENT), 3), fuzzy_refresh=share))
        usage = world.answers[f"r{at}", 0].usage
        shares.append(usage.refreshed_tokens / (usage.refreshed_tokens + usage.moved_tokens))
    assert shares == pytest.approx([0.25, 0.0, 0.5], abs=0.01)


def test_recomputing_everything_moves_nothing_and_may_be_shared():
    world = fuzzy_world_recomputing(1.0)
    world.run(request("donor", wrapped(1, DOCUMENT)))
    tokens = wrapped(2, DOCUMENT)
    world.run(request("cold", tokens, 6))
    usage = world.answers["cold", 0].usage
    assert (usage.moved_tokens, usage.refreshed_tokens, world.answers["cold", 0].plan) == (0, 0, ())
    world.run(request("again", tokens, 6))
    assert world.answers["again", 0].usage.cached_tokens == (len(tokens) - 1) // 4 * 4


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused_in_words(share):
    world = fuzzy_world_recomputing(0.25)
    with pytest.raises(RequestError, match="share from 0 to 1") as caught:
        world.engine.add(replace(request("r", DOCUMENT), fuzzy_refresh=share))
    assert caught.value.param == "fuzzy_refresh"
