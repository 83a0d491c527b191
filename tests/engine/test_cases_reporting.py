"""Faults of the field: what a request is told about its own reuse, and an operator about all."""

from __future__ import annotations

import logging

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
def test_cached_tokens_is_zero_and_not_null_when_nothing_hit(backend):
    world = make_world(backend)
    world.run(request("cold", prompt(20, 1), 3))
    assert {delta.usage.cached_tokens for delta in world.deltas} == {0}


@pytest.mark.parametrize("backend", SHARING_BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_fully_cached_prompt_reports_at_most_all_but_one_token(backend, page_size):
    world = make_world(backend, page_size=page_size)
    tokens = prompt(32, 1)
    world.run(request("cold", tokens, 3))
    world.run(request("warm", tokens, 3))
    usage = world.answers["warm", 0].usage
    assert usage.cached_tokens == 31 // page_size * page_size
    assert (usage.prompt_tokens, usage.completion_tokens) == (32, 3)


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_n_answers_share_one_prompt_and_one_count(backend):
    world = make_world(backend)
    tokens = prompt(32, 1)
    world.run(request("cold", tokens, 3, n=4))
    assert world.peak_running >= 3, "the others start as soon as the first has the prompt"
    for index in range(4):
        usage = world.answers["cold", index].usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (32, 3, 0)
        assert world.ids("cold", index) == oracle_answer(tokens, 3)
    world.run(request("warm", tokens, 3, n=2))
    warm = 0 if backend == "none" else 28
    assert {world.answers["warm", index].usage.cached_tokens for index in (0, 1)} == {warm}
    snapshot = world.engine.snapshot()
    assert snapshot.prompt_tokens == 2 * 32, "each prompt once"
    assert snapshot.hit_tokens.get("exact", 0) == warm
    if backend != "none":
        assert snapshot.prefill_tokens == 32 + 5 * 4, "siblings share what the first computed"


def test_the_next_sibling_takes_over_when_the_first_dies():
    world = make_world("hash", chunked_prefill_size=16)
    tokens = prompt(40, 1)
    world.engine.add(request("three", tokens, 3, n=3))
    world.step()
    assert len(world.engine.scheduler.running) == 1
    world.runner.before = lambda batch: 1 / 0
    world.step()
    world.runner.before = lambda batch: None
    world.run()
    assert world.answers["three", 0].finish_reason == "error"
    assert world.ids("three", 1) == world.ids("three", 2) == oracle_answer(tokens, 3)
    assert world.engine.snapshot().prefill_tokens == 32 + 40 - 16 + 4


@pytest.mark.parametrize("backend", SHARING_BACKENDS)
def test_usage_and_hits_are_those_of_the_first_admission(backend):
    """Preemption and deferral inflate neither, though a resumed request hits its own pages."""
    world = make_world(backend, pool_tokens=96, chunked_prefill_size=24)
    requests = [request(f"r{i}", prompt(12, i), 60) for i in range(4)]
    world.run(*requests)
    snapshot = world.engine.snapshot()
    assert snapshot.preemptions > 0
    assert snapshot.hit_tokens.get("exact", 0) == 0
    assert snapshot.prompt_tokens == 4 * 12
    assert {delta.usage.cached_tokens for delta in world.deltas} == {0}


def test_a_deferred_request_reports_what_its_producer_published():
    world = make_world("radix")
    shared = prompt(40, 1)
    world.run(request("a", prompt(42, 2, shared), 2), request("b", prompt(42, 3, shared), 2))
    assert world.answers["a", 0].usage.cached_tokens == 0
    assert world.answers["b", 0].usage.cached_tokens == 40
    assert world.engine.snapshot().hit_tokens == {"exact": 40}


def test_the_snapshot_counts_what_happened():
    world = make_world("radix", chunked_prefill_size=16)
    world.engine.add(request("gone", prompt(8, 1), 9))
    world.step()
    world.engine.abort("gone")
    world.run(request("done", prompt(20, 2), 3, n=2))
    world.runner.before = lambda batch: 1 / 0
    world.run(request("broken", prompt(5, 3), 3))
    snapshot = world.engine.snapshot()
    assert (snapshot.requests, snapshot.finished, snapshot.aborted, snapshot.failed) == (3, 2, 1, 1)
    assert snapshot.generated_tokens == 1 + 2 * 3
    assert snapshot.prefill_tokens == 8 + 20 + 4 + 5
    assert snapshot.steps == len(world.runner.batches)
    assert snapshot.prompt_tokens == 8 + 20 + 5
    assert snapshot.total_tokens == 1024


def test_one_line_per_prefill_batch(caplog):
    world = make_world("radix", chunked_prefill_size=16)
    with caplog.at_level(logging.INFO, "kvweave.engine"):
        world.run(request("cold", prompt(20, 1), 2))
        world.run(request("warm", prompt(20, 1), 2))
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Prefill batch")]
    assert lines == [
        "Prefill batch, #new-seq: 1, #new-token: 16, #cached-token: 0, #fuzzy-token: 0, "
        "token usage: 0.02, #running-req: 1, #queue-req: 0",
        "Prefill batch, #new-seq: 0, #new-token: 4, #cached-token: 0, #fuzzy-token: 0, "
        "token usage: 0.02, #running-req: 1, #queue-req: 0",
        "Prefill batch, #new-seq: 1, #new-token: 4, #cached-token: 16, #fuzzy-token: 0, "
        "token usage: 0.02, #running-req: 1, #queue-req: 0",
    ]


def test_logprobs_are_the_models_own_whatever_is_sampled():
    world = make_world("radix")
    tokens = prompt(20, 1)
    asked = {"logprobs": 3, "temperature": 1.7, "top_k": 5, "seed": 3, "logit_bias": {7: 50.0}}
    world.run(request("r", tokens, 4, **asked))
    answer = world.answers["r", 0]
    assert 7 in answer.token_ids
    assert len(answer.logprobs) == 4
    for at, found in enumerate(answer.logprobs):
        logits = oracle_logits([*tokens, *answer.token_ids[:at]]).astype(float)
        expected = logits - np.logaddexp.reduce(logits)
        assert found.token_id == answer.token_ids[at]
        assert found.logprob == pytest.approx(expected[found.token_id], abs=1e-4)
        best = sorted(range(len(expected)), key=lambda i: -expected[i])[:3]
        assert [token for token, _ in found.top] == best
        for token, logprob in found.top:
            assert logprob == pytest.approx(expected[token], abs=1e-4)
