"""Faults of the field: warm answers that differ from cold ones."""

from __future__ import annotations

import numpy as np
import pytest

from support.enginekit import (
    EXACT_BACKENDS,
    SHARING_BACKENDS,
    make_world,
    oracle_answer,
    oracle_logits,
    prompt,
    request,
)


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 5, 2048])
def test_warm_greedy_output_equals_cold(backend, page_size, chunk):
    world = make_world(backend, page_size=page_size, chunked_prefill_size=chunk)
    tokens = prompt(33, 1)
    for rid in ("cold", "warm", "warmer"):
        world.run(request(rid, tokens, 9))
        assert world.ids(rid) == oracle_answer(tokens, 9)
    # A conversation goes on behind its own answer.
    longer = [*tokens, *world.ids("cold"), *prompt(6, 2)]
    world.run(request("next turn", longer, 9))
    assert world.ids("next turn") == oracle_answer(longer, 9)
    if backend == "radix":
        assert world.answers["next turn", 0].usage.cached_tokens >= 41 // page_size * page_size


@pytest.mark.parametrize("backend", SHARING_BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_fully_cached_prompt_computes_its_last_token_into_a_page_of_its_own(backend, page_size):
    world = make_world(backend, page_size=page_size)
    tokens = prompt(32, 1)
    world.run(request("cold", tokens, 3))
    pool = world.engine.components.pool

    def own_pages(batch):
        assert {pool.owners(slot // page_size) for slot in batch.slots.tolist()} == {1}

    world.runner.before = own_pages
    world.run(request("warm", tokens, 3))
    assert world.ids("warm") == oracle_answer(tokens, 3)
    assert world.runner.batches[-3:] == [32 - 31 // page_size * page_size, 1, 1]


@pytest.mark.parametrize("backend", SHARING_BACKENDS)
def test_decoding_after_a_hit_never_changes_what_the_next_hit_reads(backend):
    world = make_world(backend)
    tokens = prompt(30, 1)
    world.run(request("cold", tokens, 2))
    pages = np.concatenate(list(world.engine.cache.resident()))
    slots = (pages[:, None] * 4 + np.arange(4)).ravel()
    before = world.runner.tokens[slots].copy()
    for i in range(3):
        world.run(request(f"warm{i}", [*tokens, i], 12))
    assert np.array_equal(world.runner.tokens[slots], before)


@pytest.mark.parametrize("backend", SHARING_BACKENDS)
def test_the_budget_is_charged_for_uncached_tokens_only_and_only_once(backend):
    world = make_world(backend, chunked_prefill_size=16)
    shared = prompt(64, 1)
    world.run(request("cold", shared, 1))
    assert world.runner.batches == [16, 16, 16, 16]
    world.runner.batches.clear()
    for i in range(4):
        world.engine.add(request(f"warm{i}", prompt(68, i, shared), 1))
    world.run()
    assert world.runner.batches == [16], "four times four fresh tokens make one step"


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
@pytest.mark.parametrize("chunk", [5, 2048])
def test_prompt_logprobs_are_the_same_with_and_without_a_hit(backend, chunk):
    world = make_world(backend, chunked_prefill_size=chunk)
    tokens = prompt(150, 1)
    world.run(request("cold", tokens, 2, prompt_logprobs=2))
    world.run(request("warm", tokens, 2, prompt_logprobs=2))
    world.run(request("echo", tokens, 0, prompt_logprobs=0))
    cold, warm, echo = (world.answers[rid, 0] for rid in ("cold", "warm", "echo"))
    assert cold.prompt_logprobs == warm.prompt_logprobs
    assert [at.logprob for at in echo.prompt_logprobs] == [
        at.logprob for at in cold.prompt_logprobs
    ]
    assert {at.top for at in echo.prompt_logprobs} == {()}
    assert (echo.text, echo.token_ids, echo.finish_reason) == ("", [], "length")
    assert warm.usage.cached_tokens == 0, "all of it had to be computed"
    assert warm.token_ids == oracle_answer(tokens, 2)
    first, *rest = cold.prompt_logprobs
    assert (first.token_id, first.logprob, first.top) == (tokens[0], None, ())
    assert [at.token_id for at in rest] == tokens[1:]
    for at in (0, 77, 148):
        logits = oracle_logits(tokens[: at + 1]).astype(float)
        expected = logits - np.logaddexp.reduce(logits)
        assert rest[at].logprob == pytest.approx(expected[tokens[at + 1]], abs=1e-4)
        assert [token for token, _ in rest[at].top] == np.argsort(-logits)[:2].tolist()


def test_prompt_logprobs_come_once_and_survive_preemption_and_siblings():
    world = make_world("radix", pool_tokens=96, chunked_prefill_size=16)
    tokens = [prompt(20, i) for i in range(3)]
    for i in range(3):
        world.engine.add(request(f"r{i}", tokens[i], 60, prompt_logprobs=0, n=1 + i % 2))
    world.run()
    assert world.engine.snapshot().preemptions > 0
    for i in range(3):
        assert [at.token_id for at in world.answers[f"r{i}", 0].prompt_logprobs] == tokens[i]
    assert world.answers["r1", 1].prompt_logprobs is None


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_scores_found_before_a_preemption_are_not_found_again(backend):
    world = make_world(backend, chunked_prefill_size=50)
    tokens = prompt(160, 1)
    world.engine.add(request("r", tokens, 2, prompt_logprobs=0))
    for steps in (1, 2):
        for _ in range(steps):
            world.step()
        world.engine.scheduler._preempt(world.engine.scheduler.running[0])
        world.engine.check()
    world.run()
    undisturbed = make_world(backend)
    undisturbed.run(request("r", tokens, 2, prompt_logprobs=0))
    assert world.answers["r", 0].prompt_logprobs == undisturbed.answers["r", 0].prompt_logprobs
    recomputed = 0 if backend != "none" else 50 + 100
    assert world.engine.snapshot().prefill_tokens <= 160 + recomputed + 2 * 4


def test_long_prompts_with_logprobs_are_computed_in_short_chunks():
    """Every scored token needs a row as wide as the vocabulary: never all at once."""
    world = make_world("radix", chunked_prefill_size=2048)
    rows = []
    world.runner.before = lambda batch: rows.append(len(batch.logits_at))
    world.run(request("long", prompt(600, 1), 1, prompt_logprobs=1))
    assert max(rows) <= 129


@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("pool_tokens", [1024, 96])
def test_the_same_seed_gives_the_same_answer_whatever_else_happens(others, pool_tokens):
    """Also beside others, and after a preemption."""
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 11}
    alone = make_world("radix")
    alone.run(request("r", prompt(12, 1), 50, **sampling))
    crowded = make_world("radix", pool_tokens=pool_tokens)
    for i in range(others):
        crowded.engine.add(request(f"o{i}", prompt(12, 5 + i), 50, temperature=1.0))
    crowded.run(request("r", prompt(12, 1), 50, **sampling))
    assert crowded.ids("r") == alone.ids("r")
    if others and pool_tokens < 100:
        assert crowded.engine.snapshot().preemptions > 0
    different = make_world("radix")
    different.run(request("r", prompt(12, 1), 50, **{**sampling, "seed": 12}))
    assert different.ids("r") != alone.ids("r")


def test_samples_of_one_seed_differ_from_each_other_and_repeat():
    worlds = [make_world("radix"), make_world("radix")]
    for world in worlds:
        world.run(request("r", prompt(12, 1), 20, n=3, temperature=1.0, seed=5))
    answers = [[world.ids("r", index) for index in range(3)] for world in worlds]
    assert answers[0] == answers[1]
    assert len({tuple(ids) for ids in answers[0]}) == 3
