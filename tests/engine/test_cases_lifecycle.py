"""Faults of the field: everything that can end a request, at every moment of its life."""

from __future__ import annotations

import pytest

from kvweave.engine.engine import MAX_FAILURES
from kvweave.errors import EngineDeadError, OverloadedError, RequestError
from support.enginekit import EXACT_BACKENDS, explode, make_world, oracle_answer, prompt, request


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
@pytest.mark.parametrize("method", ["match", "lease", "grow", "publish", "record"])
def test_slots_come_back_when_the_cache_fails_for_one_request(backend, method, monkeypatch):
    world = make_world(backend, chunked_prefill_size=16)
    world.engine.add(request("healthy", prompt(20, 1), 8))
    world.step()
    monkeypatch.setattr(world.engine.cache, method, explode)
    world.engine.add(request("victim", prompt(20, 2), 8))
    world.step()
    monkeypatch.undo()
    world.run()
    world.run(request("later", prompt(20, 2), 8))
    assert world.ids("later") == oracle_answer(prompt(20, 2), 8)
    world.assert_idle()
    for rid in ("healthy", "victim"):
        answer = world.answers[rid, 0]
        assert answer.finish_reason == "length" or "injected" in answer.error
    if method in ("lease", "record"):  # never called for one that runs already
        assert world.ids("healthy") == oracle_answer(prompt(20, 1), 8)
        assert world.answers["victim", 0].finish_reason == "error"


def test_a_failing_schedule_costs_those_that_ran_and_nobody_else(monkeypatch):
    world = make_world("radix", max_running_requests=1)
    world.engine.add(request("ran", prompt(20, 1), 8))
    world.step()
    world.engine.add(request("waited", prompt(20, 2), 8))
    monkeypatch.setattr(world.engine.scheduler, "schedule", explode)
    world.step()
    monkeypatch.undo()
    world.run()
    assert world.answers["ran", 0].finish_reason == "error"
    assert world.ids("waited") == oracle_answer(prompt(20, 2), 8)
    world.assert_idle()


@pytest.mark.parametrize("where", ["runner", "sampler"])
def test_an_exception_in_a_step_fails_exactly_its_batch(where, monkeypatch, caplog):
    world = make_world("radix", max_running_requests=2)
    for rid in ("a", "b", "c"):
        world.engine.add(request(rid, prompt(20, ord(rid)), 4))
    if where == "runner":
        world.runner.before = explode
    else:
        monkeypatch.setattr("kvweave.engine.execution.executor.row_outputs", explode)
    deltas = world.step()
    assert {(d.rid, d.finish_reason) for d in deltas} == {("a", "error"), ("b", "error")}
    assert all("injected" in d.error for d in deltas)
    assert {r.rid for r in caplog.records if hasattr(r, "rid")} == {"a", "b"}, "the log names them"
    assert sum(bool(record.exc_info) for record in caplog.records) == 1, "and says why once"
    world.runner.before = lambda batch: None
    monkeypatch.undo()
    world.run()
    assert world.ids("c") == oracle_answer(prompt(20, ord("c")), 4)
    world.assert_idle()


def test_nothing_of_a_failed_forward_pass_is_ever_reused():
    world = make_world("radix")
    world.runner.before = explode
    world.run(request("failed", prompt(20, 1), 4))
    world.runner.before = lambda batch: None
    world.run(request("again", prompt(20, 1), 4))
    assert world.answers["again", 0].usage.cached_tokens == 0
    assert world.ids("again") == oracle_answer(prompt(20, 1), 4)


def test_an_exception_in_one_requests_own_processing_fails_only_that_one(monkeypatch):
    world = make_world("radix")
    bad, good = request("bad", prompt(20, 1), 4), request("good", prompt(20, 2), 4)
    world.engine.add(bad)
    world.engine.add(good)
    answers = {s.group.request.rid: a for s, a in world.engine._answers.items()}
    monkeypatch.setattr(answers["bad"]._detokenizer, "add", explode)
    world.run()
    assert world.answers["bad", 0].finish_reason == "error"
    assert world.ids("good") == oracle_answer(prompt(20, 2), 4)
    world.assert_idle()


def test_broken_penalties_and_broken_logits_fail_only_their_own_request(monkeypatch):
    world = make_world("radix")
    for rid in ("penalty", "nan", "good"):
        sampling = {"presence_penalty": 1.0} if rid == "penalty" else {}
        world.engine.add(request(rid, prompt(20, len(rid)), 4, **sampling))
    answers = {s.group.request.rid: a for s, a in world.engine._answers.items()}
    monkeypatch.setattr(answers["penalty"].sampling.adjuster, "collect", explode)
    forward = world.runner.forward

    def spoiled(batch):
        logits = forward(batch)
        logits[1] = float("nan")
        return logits

    world.engine.components.runner.forward = spoiled
    world.step()
    world.engine.components.runner.forward = forward
    world.run()
    assert "injected" in world.answers["penalty", 0].error
    assert "no valid numbers" in world.answers["nan", 0].error
    assert world.ids("good") == oracle_answer(prompt(20, 4), 4)
    world.assert_idle()


def test_after_repeated_failures_the_engine_is_dead_and_everybody_knows():
    world = make_world("radix", max_running_requests=1)
    world.runner.before = explode
    rids = [f"r{i}" for i in range(MAX_FAILURES + 3)]
    for rid in rids:
        world.engine.add(request(rid, prompt(20, 1), 4))
    for _ in range(MAX_FAILURES):
        assert not world.engine.dead
        world.step()
    assert world.engine.dead
    assert not world.engine.has_work
    assert {rid for rid, _ in world.answers} == set(rids)
    assert {answer.finish_reason for answer in world.answers.values()} == {"error"}
    with pytest.raises(EngineDeadError):
        world.engine.add(request("late", prompt(20, 1), 4))
    world.assert_idle()


def test_requests_that_break_every_step_they_are_in_do_not_break_the_engine():
    """Who sends nothing but poison harms nobody: the engine tries a token of its own."""
    world = make_world("radix", pool_tokens=64)
    world.run(request("fills the pool", prompt(60, 2), 4))
    poison = 77

    def swallow(batch):
        if poison in batch.token_ids:
            raise RuntimeError("injected")

    world.runner.before = swallow
    for i in range(3 * MAX_FAILURES):
        world.run(request(f"poison{i}", [poison] * 20, 4))
        assert world.answers[f"poison{i}", 0].finish_reason == "error"
    assert not world.engine.dead
    world.run(request("good", prompt(20, 4), 4))
    assert world.ids("good") == oracle_answer(prompt(20, 4), 4)
    world.assert_idle()


def test_a_success_in_between_forgives_failures():
    world = make_world("radix")
    for i in range(3 * MAX_FAILURES):
        world.runner.before = explode if i % 3 else lambda batch: None
        world.run(request(f"r{i}", prompt(20, i), 1))
    assert not world.engine.dead


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 8])
def test_aborting_in_queue_in_prefill_in_decode_leaks_nothing(backend, steps):
    world = make_world(backend, chunked_prefill_size=16)
    tokens = prompt(60, 1)
    world.engine.add(request("gone", tokens, 20, n=2))
    for _ in range(steps):
        world.step()
    deltas = world.engine.abort("gone")
    assert {(d.index, d.finish_reason) for d in deltas} == {(0, "abort"), (1, "abort")}
    assert not world.engine.has_work
    world.assert_idle()
    assert world.engine.abort("gone") == []
    world.run(request("next", tokens, 20))
    assert world.ids("next") == oracle_answer(tokens, 20)
    world.assert_idle()


def test_aborting_after_a_chunk_was_published_frees_nothing_that_the_tree_owns():
    world = make_world("radix", chunked_prefill_size=16)
    tokens = prompt(60, 1)
    world.engine.add(request("gone", tokens, 20))
    world.step()
    world.step()
    world.engine.abort("gone")
    world.engine.check()
    assert world.engine.snapshot().cached_tokens == 32
    world.run(request("next", tokens, 4))
    assert world.answers["next", 0].usage.cached_tokens == 32
    assert world.ids("next") == oracle_answer(tokens, 4)


def test_a_prompt_too_large_for_the_pool_is_refused_and_the_others_go_on():
    world = make_world("radix", pool_tokens=64)
    world.engine.add(request("small", prompt(20, 1), 4))
    with pytest.raises(RequestError, match="KV pool holds 64") as refused:
        world.engine.add(request("large", prompt(65, 2), 4))
    assert refused.value.code == "context_length_exceeded"
    world.run()
    assert world.ids("small") == oracle_answer(prompt(20, 1), 4)


def test_an_answer_that_outgrows_the_pool_ends_alone_by_length():
    world = make_world("radix", pool_tokens=64)
    world.run(request("grows", prompt(40, 1), None), request("small", prompt(20, 2), 4))
    assert world.ids("grows") == oracle_answer(prompt(40, 1), 64 + 1 - 40)
    assert world.ids("small") == oracle_answer(prompt(20, 2), 4)
    world.assert_idle()


def test_the_context_ends_an_answer_without_max_tokens():
    world = make_world("radix", context_length=50)
    world.run(request("endless", prompt(40, 1), None))
    assert world.answers["endless", 0].finish_reason == "length"
    assert world.ids("endless") == oracle_answer(prompt(40, 1), 10)
    with pytest.raises(RequestError, match="it may have 49"):
        world.engine.add(request("long", prompt(50, 1), None))


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_preempted_answer_equals_the_undisturbed_one(backend, page_size):
    world = make_world(backend, page_size=page_size, pool_tokens=96, chunked_prefill_size=24)
    requests = [request(f"r{i}", prompt(12, i), 60) for i in range(4)]
    world.run(*requests)
    assert world.engine.snapshot().preemptions > 0
    for each in requests:
        assert world.ids(each.rid) == oracle_answer(each.prompt_ids, 60)
        assert world.answers[each.rid, 0].usage.cached_tokens < len(each.prompt_ids)
    world.assert_idle()


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_two_requests_never_evict_each_other_for_ever(backend):
    """Each alone fits, both together do not: the work wasted is bounded."""
    world = make_world(backend, pool_tokens=64)
    world.run(request("a", prompt(8, 1), 55), request("b", prompt(8, 2), 55))
    for rid, seed in (("a", 1), ("b", 2)):
        assert world.ids(rid) == oracle_answer(prompt(8, seed), 55)
    assert 1 <= world.engine.snapshot().preemptions <= 2
    # The older one was never interrupted.
    order = [delta.rid for delta in world.deltas if delta.finish_reason]
    assert order == ["a", "b"]
    assert len(world.runner.batches) <= 2 * 55 + 10


def test_the_lowest_priority_newest_request_is_preempted_even_if_it_asks():
    world = make_world("radix", pool_tokens=64, page_size=1)
    world.engine.add(request("low", prompt(8, 1), 50, priority=-1))
    world.step()
    world.engine.add(request("high", prompt(8, 2), 50, priority=1))
    world.run()
    ended = [delta.rid for delta in world.deltas if delta.finish_reason]
    assert ended == ["high", "low"]
    assert world.ids("low") == oracle_answer(prompt(8, 1), 50)
    assert world.ids("high") == oracle_answer(prompt(8, 2), 50)
    assert world.engine.snapshot().preemptions > 0


def test_flush_is_refused_with_a_reason_while_requests_live():
    world = make_world("radix")
    world.run(request("warm", prompt(20, 1), 4))
    world.engine.add(request("lives", prompt(20, 1), 4))
    with pytest.raises(RequestError, match="1 now") as refused:
        world.engine.flush_cache()
    assert refused.value.status == 409
    world.run()
    world.engine.flush_cache()
    assert world.engine.snapshot().cached_tokens == 0
    world.run(request("again", prompt(20, 1), 4))
    assert world.answers["again", 0].usage.cached_tokens == 0


def test_a_full_queue_is_said_so_and_a_taken_rid_too():
    world = make_world("radix", max_queued_requests=2)
    world.engine.add(request("a", prompt(8, 1), 1))
    with pytest.raises(RequestError, match="'a' is running"):
        world.engine.add(request("a", prompt(8, 1), 1))
    world.engine.add(request("b", prompt(8, 1), 1))
    with pytest.raises(OverloadedError, match="2 answers wait already"):
        world.engine.add(request("c", prompt(8, 1), 1))
    world.run()
    world.engine.add(request("a", prompt(8, 1), 1))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 96]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop_token_ids": (96,)}, "stop_token_ids"),
        ({"logit_bias": {96: 1.0}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_bad_requests_are_refused_by_name_and_leave_nothing_behind(changes, param):
    world = make_world("radix")
    tokens = changes.pop("prompt", [1, 2, 3])
    with pytest.raises(RequestError) as refused:
        world.engine.add(request("bad", tokens, 4, **changes))
    assert refused.value.param == param
    assert not world.engine.has_work
    world.engine.check()
