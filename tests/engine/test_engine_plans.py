"""Plans with holes: the scheduler computes what a plan leaves, wherever that lies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvweave.kv.pool import PagePool
from kvweave.prefix.contract import CacheOptions
from kvweave.prefix.lease import Lease, Plan, RequestView, Span
from kvweave.prefix.radix import RadixCache
from support.enginekit import OracleRunner, World, make_world, oracle_answer, prompt, request


class WovenCache(RadixCache):
    """Serves fixed spans of any prompt long enough, as if a donor had held the same tokens."""

    spans = (Span(6, 10, 1, 40), Span(19, 13, 1, 3))
    recompute = np.array([6, 7, 20], np.int32)

    def __init__(self, pool: PagePool, options: CacheOptions, runner: OracleRunner) -> None:
        super().__init__(pool, options)
        self.runner = runner

    def lease(self, view: RequestView) -> Lease:
        lease = super().lease(view)
        spans = tuple(span for span in self.spans if span.start >= lease.plan.exact)
        if not view.fuzzy or not spans or spans[-1].end >= len(view.tokens):
            return lease
        if not self.grow(lease, spans[-1].end):
            return lease
        recompute = [at for at in self.recompute if at >= spans[0].start]
        lease.plan = Plan(len(view.tokens), lease.plan.exact, spans, np.array(recompute, np.int32))
        size = self.page_size
        for span in spans:
            at = np.arange(span.start, span.end)
            slots = lease.pages[at // size] * size + at % size
            self.runner.tokens[slots] = view.tokens[at]
            self.runner.positions[slots] = at
        return lease


def woven_world(**options) -> World:
    return make_world(make_cache=WovenCache, **options)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 7, 2048])
def test_irregular_positions_are_computed_and_nothing_else(page_size, chunk):
    world = woven_world(page_size=page_size, chunked_prefill_size=chunk)
    positions = []
    world.runner.before = lambda batch: positions.extend(batch.positions.tolist())
    tokens = prompt(40, 1)
    world.run(request("r", tokens, 6))
    fresh = [*range(6), 6, 7, 16, 17, 18, 20, *range(32, 40)]
    assert positions == [*fresh, 40, 41, 42, 43, 44]
    assert world.ids("r") == oracle_answer(tokens, 6)
    assert world.engine.snapshot().prefill_tokens == len(fresh)


def test_usage_and_spans_are_reported_with_the_first_delta():
    world = woven_world()
    world.run(request("r", prompt(40, 1), 3))
    usage = world.answers["r", 0].usage
    assert (usage.cached_tokens, usage.moved_tokens, usage.refreshed_tokens) == (0, 20, 3)
    assert [delta.plan for delta in world.deltas] == [WovenCache.spans, (), ()]
    assert world.engine.snapshot().hit_tokens == {"exact": 0, "moved": 20}


def test_an_approximate_request_makes_progress_but_publishes_its_exact_prefix_only():
    world = woven_world(chunked_prefill_size=3)
    tokens = prompt(40, 1)
    world.run(request("r", tokens, 6))
    assert world.engine.snapshot().cached_tokens == 4, "one page lies before the first span"
    world.assert_idle()
    world.run(request("exact", tokens, 6, fuzzy=False))
    assert world.answers["exact", 0].usage.cached_tokens == 4
    assert world.answers["exact", 0].plan == ()
    assert world.engine.snapshot().cached_tokens == 44


@pytest.mark.parametrize(("known", "then"), [(None, 0), (9, 9)])
def test_behind_output_nobody_takes_the_prompts_question_for_old_text(known, then):
    """A cache that is not told where the question begins counts from the end, where output is."""
    world = woven_world()
    world.engine.add(replace(request("r", prompt(40, 1), 9), protected_from=known))
    [sequence] = world.engine.scheduler.sequences()
    assert sequence.view().protected_from == known
    while not sequence.generated:
        world.step()
    assert sequence.view().protected_from == then


def test_prompt_logprobs_demand_exactness():
    world = woven_world()
    world.run(request("r", prompt(40, 1), 3, prompt_logprobs=0))
    assert world.answers["r", 0].plan == ()
    assert world.engine.snapshot().prefill_tokens == 40


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_preempted_plan_is_made_anew_over_prompt_and_output(page_size):
    world = woven_world(page_size=page_size, pool_tokens=128, chunked_prefill_size=5)
    requests = [request(f"r{i}", prompt(40, i), 40) for i in range(3)]
    world.run(*requests)
    assert world.engine.snapshot().preemptions > 0
    for each in requests:
        assert world.ids(each.rid) == oracle_answer(each.prompt_ids, 40)
        assert world.answers[each.rid, 0].usage.moved_tokens == 20
    world.assert_idle()
