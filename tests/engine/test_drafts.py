"""Drafts change no answer: not its tokens, text, log probabilities or end, nor what is cached."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig, ModelConfig, SpeculativeConfig
from kvweave.engine.engine import Engine
from kvweave.engine.scheduler.drafts import DraftHistory, StepCost, repeated
from kvweave.engine.types import Completion, GenerateRequest, GrammarSpec, SamplingParams
from kvweave.prefix.lease import RequestView
from support.enginekit import (
    EOS,
    EXACT_BACKENDS,
    VOCABULARY,
    Faults,
    assert_answers,
    make_world,
    oracle_answer,
    prompt,
    random_life,
    request,
)

NGRAM = SpeculativeConfig(algorithm="NGRAM")
Answers = dict[tuple[str, int], Sequence[int]]


def foretell(world: Any, answers: Callable[[Any], Sequence[int]], rng: Any) -> None:
    """Draft what `answers` says of a sequence, now and then with an error in it."""
    drafter = world.engine.scheduler._drafter
    assert drafter is not None

    def propose(sequence: Any, most: int, cost: float) -> tuple[int, ...]:
        known = answers(sequence)[sequence.generated :]
        draft = list(known[: min(most, int(rng.integers(0, 9)))])
        if draft and rng.random() < 0.4:
            draft[int(rng.integers(len(draft)))] = int(rng.integers(VOCABULARY))
        return tuple(draft)

    drafter._propose = propose  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_random_lives_with_drafts_end_idle_and_answer_right(backend, seed):
    rng = np.random.default_rng([seed, len(backend)])
    world = make_world(
        backend,
        page_size=int(rng.choice([1, 4, 16])),
        pool_tokens=int(rng.choice([160, 256, 640])),
        chunked_prefill_size=int(rng.choice([7, 32, 256])),
        max_running_requests=int(rng.choice([1, 3, 8])),
        max_queued_requests=12,
        speculative=NGRAM,
    )
    told: dict[str, list[int]] = {}

    def truth(sequence: Any) -> list[int]:
        rid = sequence.group.request.rid
        if rid not in told:
            told[rid] = oracle_answer(sequence.group.request.prompt_ids, 200)
        return told[rid]

    foretell(world, truth, rng)
    faults = seed == 2
    world.runner.before = Faults(rng, 0.1 if faults else 0.0)
    requests = random_life(world, rng, 80)
    assert_answers(world, requests, faults)
    snapshot = world.engine.snapshot()
    assert 0 < snapshot.accepted_tokens < snapshot.drafted_tokens
    assert not world.engine.scheduler._drafter._histories


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5, "n": 3},
    "filtered": {"temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "logprobs": {"temperature": 0.7, "seed": 9, "logprobs": 4},
    "penalised": {
        "presence_penalty": 1.0,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
        "temperature": 0.9,
        "seed": 2,
    },
    "penalised greedy": {"frequency_penalty": 2.0, "repetition_penalty": 1.5, "logprobs": 0},
    "biased": {"logit_bias": {3: 5.0, 8: 6.0}, "temperature": 1.0, "seed": 4, "n": 2},
    "bad words": {"bad_words_ids": ((3, 8), (8,)), "logit_bias": {3: 9.0}, "stop": ()},
    "allowed": {"allowed_token_ids": (1, 2, 3, 4), "temperature": 1.0, "seed": 1},
    "stop strings": {"stop": ("#$", "A", "zz"), "temperature": 1.0, "seed": 3},
    "shown stop strings": {"stop": ("5", "6"), "include_stop_str_in_output": True},
    "stop tokens": {"stop_token_ids": (40, 41, 42, 43), "min_tokens": 3},
    "end": {"ignore_eos": False, "logit_bias": {EOS: 4.0}, "temperature": 1.0, "seed": 6},
    "late end": {"ignore_eos": False, "logit_bias": {EOS: 9.0}, "min_tokens": 11},
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_change_nothing_whatever_is_asked(name):
    rng = np.random.default_rng(len(name))
    asked = [
        request(f"{number}", prompt(10 + number, number), int(rng.integers(1, 60)), **how)
        for number, how in enumerate([SAMPLINGS[name]] * 6)
    ]
    plain = make_world()
    plain.run(*asked)
    drafted = make_world(speculative=NGRAM)
    known: Answers = {key: answer.token_ids for key, answer in plain.answers.items()}
    foretell(drafted, lambda s: known[s.group.request.rid, s.index], rng)
    drafted.run(*asked)
    assert drafted.answers.keys() == plain.answers.keys()
    for key, answer in plain.answers.items():
        assert_same(drafted.answers[key], answer)
    snapshot = drafted.engine.snapshot()
    assert snapshot.generated_tokens == plain.engine.snapshot().generated_tokens
    if snapshot.generated_tokens > 40:
        assert snapshot.accepted_tokens > 0
        assert snapshot.steps < plain.engine.snapshot().steps
    drafted.assert_idle()


def assert_same(drafted: Completion, plain: Completion) -> None:
    for name in ("text", "token_ids", "logprobs", "finish_reason", "matched_stop", "usage"):
        assert getattr(drafted, name) == getattr(plain, name), name


def test_only_verified_tokens_are_cached():
    world = make_world(page_size=1, speculative=NGRAM)
    drafter = world.engine.scheduler._drafter
    drafter._propose = lambda *_: (7,) * 5
    world.run(request("a", prompt(6), 9))
    told = prompt(6) + oracle_answer(prompt(6), 9)
    path = []
    for node in world.engine.cache.tree.nodes():
        path += node.tokens.tolist()
    assert path == told[: len(path)]
    assert len(path) == len(told) - 1
    assert world.engine.snapshot().drafted_tokens > 20


def test_drafts_take_no_page_that_others_need():
    """The pool holds both requests to their last token, and not one page more."""
    world = make_world(page_size=4, pool_tokens=64, speculative=NGRAM)
    foretell(world, lambda s: oracle_answer(s.group.request.prompt_ids, 24), FullDrafts())
    world.run(request("a", prompt(8, 1), 24), request("b", prompt(8, 2), 24))
    assert world.engine.snapshot().preemptions == 0
    assert world.engine.snapshot().accepted_tokens > 20


class FullDrafts:
    """A generator of random numbers that makes no errors."""

    def integers(self, *_: int) -> int:
        return 8

    def random(self) -> float:
        return 1.0


def test_an_earlier_answer_is_proposed_and_never_anothers():
    world = make_world(speculative=NGRAM)
    world.run(request("first", prompt(20), 40, salt="a"))
    world.run(request("stranger", prompt(20), 40, salt="b"))
    assert world.engine.snapshot().accepted_tokens == 0
    steps = world.engine.snapshot().steps
    world.run(request("again", prompt(20), 40, salt="a"))
    assert world.engine.snapshot().steps - steps < 12
    assert world.ids("again") == world.ids("first") == oracle_answer(prompt(20), 40)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_text_cached_at_another_place_goes_on_and_only_in_its_namespace(page_size):
    world = make_world("fuzzy_match", page_size=page_size)
    cache, text = world.engine.cache, np.array(prompt(160), np.int32)
    world.run(request("donor", text, 1, salt="a"))
    for start, end in ((13, 60), (0, 45), (50, 90)):
        own = np.array(prompt(9, 5), np.int32)
        tokens = np.concatenate([own, text[start:end]])
        for salt, expected in (("a", text[end : end + 30].tolist()), ("b", []), (None, [])):
            namespace = world.engine.namespace(salt)
            lease = cache.lease(RequestView("other", own, namespace, fuzzy=False))
            assert cache.continuation(lease, tokens, 30).tolist() == expected
            assert not len(cache.continuation(lease, tokens[::-1], 30))
            cache.release(lease)
    world.assert_idle()


def test_a_drafter_that_fails_costs_no_answer(caplog):
    world = make_world(speculative=NGRAM)
    world.engine.cache.continuation = lambda *_: 1 / 0
    world.run(request("a", prompt(9), 12), request("b", prompt(7), 12))
    assert world.ids("a") == oracle_answer(prompt(9), 12)
    assert [record.message for record in caplog.records] == [
        "drafts failed, answers go on; logged once"
    ]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_the_longest_and_latest_repetition_is_found(tokens, least, most):
    array = np.array(tokens, np.int32)
    found, matched = repeated(array, least, most)
    best, expected = 0, []
    for end in range(1, len(tokens)):
        same = 0
        while same < min(end, 16) and tokens[end - 1 - same] == tokens[-1 - same]:
            same += 1
        if same >= max(best, least):
            best = same
            following = tokens[end:]
            expected = (following * most)[:most]
    assert matched == best
    assert found[:most].tolist() == expected


def test_drafts_that_are_refused_end_and_are_tried_again_later():
    history, length, tries = DraftHistory(), 100, []
    for _ in range(400):
        length += 1
        if history.acceptance(False, length) > 0.1:
            tries.append(length)
            history.verified(False, length, 3, 0)
    assert len(tries) < 200
    assert tries[-1] > 450
    assert history.acceptance(True, length) > 0.5


def test_the_cost_of_a_token_is_the_slope_of_what_was_measured():
    cost = StepCost()
    rng = np.random.default_rng(0)
    assert 0 < cost.token_share(1) < 0.1
    for _ in range(300):
        tokens = int(rng.integers(1, 17))
        cost.observe(tokens, 0.020 + 0.001 * tokens + 0.0005 * rng.normal())
    assert cost.token_share(1) == pytest.approx(1 / 21, rel=0.2)
    assert cost.token_share(8) == pytest.approx(8 / 28, rel=0.2)
    for _ in range(300):
        cost.observe(int(rng.integers(1, 17)), 0.020)
    assert cost.token_share(1) < 0.01


@pytest.mark.parametrize(
    ("name", "backend"), [("llama", "fuzzy_match"), ("qwen2", "hash"), ("mla_interleaved", "radix")]
)
def test_tiny_models_answer_alike_with_drafts(tiny, name, backend):
    loaded = tiny(name)
    plain, drafted = (model_engine(loaded, backend, how) for how in ("none", "NGRAM"))
    rng = np.random.default_rng(3)
    asked = []
    for number in range(6):
        words = [rng.integers(0, 256, 5).tolist() for _ in range(3)]
        text = [token for _ in range(12) for token in words[int(rng.integers(3))]]
        sampling = SamplingParams(
            max_tokens=40,
            temperature=0.0 if number < 4 else 0.5,
            seed=number,
            ignore_eos=True,
            frequency_penalty=0.5 if number == 3 else 0.0,
        )
        asked.append(GenerateRequest(rid=f"{number}", prompt_ids=tuple(text), sampling=sampling))
    expected = run(plain, asked)
    assert run(drafted, asked) == expected
    assert run(drafted, asked) == expected  # now from what is cached
    assert drafted.snapshot().accepted_tokens > (10 if backend == "hash" else 60)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_obey_grammars_and_end_with_them(tiny, temperature):
    spec = GrammarSpec(kind="regex", text="(ab|ac|b){3,12}(xyz){2,4}")
    sampling = SamplingParams(max_tokens=40, temperature=temperature, seed=4, grammar=spec)
    asked = [
        GenerateRequest(rid=f"{at}", prompt_ids=tuple(range(at + 3)), sampling=sampling)
        for at in range(6)
    ]
    plain, drafted = (model_engine(tiny("llama"), "radix", how) for how in ("none", "NGRAM"))
    expected = run(plain, asked)
    rng = np.random.default_rng(1)
    world = SimpleNamespace(engine=drafted)
    foretell(world, lambda s: [*expected[s.group.request.rid], 7, 7, 7], rng)
    assert run(drafted, asked) == expected
    assert drafted.snapshot().accepted_tokens > 20
    decode = tiny("llama").tokenizer.decode
    texts = [decode(ids, skip_special_tokens=True) for ids in expected.values()]
    assert all(re.fullmatch(spec.text, text) for text in texts)


def model_engine(loaded: Any, backend: str, algorithm: str) -> Engine:
    config = EngineConfig(
        model=ModelConfig(),
        cache=CacheConfig(prefix_cache_backend=backend, page_size=4, max_total_tokens=2048),
        fuzzy=FuzzyConfig(self_check="off", max_share=0.0),
        speculative=SpeculativeConfig(algorithm=algorithm),
    )
    return Engine(config, loaded)


def run(engine: Engine, asked: Sequence[GenerateRequest]) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {each.rid: [] for each in asked}
    with torch.inference_mode():
        for each in asked:
            engine.add(each)
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None
                answers[delta.rid] += delta.token_ids
    return answers
