"""Grammars in the engine: masks, ends, company, compilation beside other requests."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvweave.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculativeConfig
from kvweave.engine.async_engine import AsyncEngine
from kvweave.engine.engine import Engine
from kvweave.engine.sampling.grammar import GrammarCompiler, GrammarMatcher
from kvweave.engine.sampling.logits import mask_logits
from kvweave.engine.sampling.sampler import SamplingState, sample
from kvweave.engine.types import Completion, GenerateRequest, GrammarSpec, SamplingParams
from kvweave.errors import KvweaveError, RequestError
from support.enginekit import answer_of
from support.tinymodels import byte_tokenizer

PROMPT = tuple(b"Say it:")
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
JSON = GrammarSpec("json_schema", json.dumps(SCHEMA))
PATTERN = GrammarSpec("regex", "(ab|c){3,6}")


def engine_of(tiny, speculative=None, **scheduler):
    config = EngineConfig(
        cache=CacheConfig(prefix_cache_backend="radix", page_size=4, max_total_tokens=1024),
        scheduler=SchedulerConfig(random_seed=0, **scheduler),
        speculative=speculative or SpeculativeConfig(),
    )
    return Engine(config, tiny("llama"))


def ask(rid, grammar, max_tokens=120, **sampling):
    params = SamplingParams(max_tokens=max_tokens, grammar=grammar, **sampling)
    return GenerateRequest(rid=rid, prompt_ids=PROMPT, sampling=params)


def run(engine, *requests, answers=None):
    """Serve to the end; `answers` holds what was told before."""
    for request in requests:
        engine.add(request)
    answers = {} if answers is None else answers
    while engine.has_work:
        for delta in engine.step():
            answers.setdefault((delta.rid, delta.index), Completion()).extend(delta)
        engine.check()
    return answers


def test_every_row_obeys_its_own_grammar(tiny):
    engine = engine_of(tiny)
    requests = [
        ask("json", JSON, seed=1, n=4, logprobs=2),
        ask("pattern", PATTERN, seed=2, n=4),
        ask("free", None, seed=3, n=2, max_tokens=30),
        ask("greedy", JSON, temperature=0.0, presence_penalty=1.0, logit_bias={120: 5.0}),
    ]
    answers = run(engine, *requests)
    for (rid, _), answer in answers.items():
        assert answer.error is None
        if rid in ("json", "greedy") and answer.finish_reason == "stop":
            value = json.loads(answer.text)
            assert set(value) == {"n", "ok"}
            assert value["n"] <= 99
        elif rid == "pattern":
            assert answer.finish_reason == "stop"
            assert re.fullmatch("(ab|c){3,6}", answer.text)
    assert {a.finish_reason for (rid, _), a in answers.items() if rid == "json"} >= {"stop"}
    assert len(answers["json", 0].logprobs) == len(answers["json", 0].token_ids)


def test_a_preempted_answer_goes_on_in_its_grammar(tiny):
    long = ask("long", GrammarSpec("regex", "(ab|c){20,30}"), seed=2)
    alone = run(engine_of(tiny), long)["long", 0]
    engine = engine_of(tiny, max_running_requests=1)
    engine.add(long)
    answer = Completion()
    for _ in range(10):
        for delta in engine.step():
            answer.extend(delta)
    engine.add(replace(ask("urgent", PATTERN), priority=1))
    while engine.has_work:
        for delta in engine.step():
            if delta.rid == "long":
                answer.extend(delta)
    assert engine.snapshot().preemptions == 1
    assert (answer.text, answer.finish_reason) == (alone.text, "stop")


def test_an_answer_ends_where_nothing_may_follow(tiny):
    engine = engine_of(tiny)
    exact = GrammarSpec("regex", "abc")
    answers = run(
        engine,
        ask("plain", exact),
        ask("eos", exact, ignore_eos=True),
        ask("long", exact, min_tokens=50),
        ask("cut", exact, max_tokens=2),
        ask("stopped", exact, stop=("b",)),
        ask("more", GrammarSpec("regex", "a+"), ignore_eos=True, max_tokens=20),
    )
    ends = {rid: (a.text, a.finish_reason, a.matched_stop) for (rid, _), a in answers.items()}
    assert ends["plain"] == ends["eos"] == ends["long"] == ("abc", "stop", None)
    assert ends["cut"] == ("ab", "length", None)
    assert ends["stopped"] == ("a", "stop", "b")
    assert ends["more"] == ("a" * 20, "length", None)


def test_a_request_that_leaves_no_token_fails_alone(tiny):
    engine = engine_of(tiny)
    none_left = ask("none", GrammarSpec("regex", "abc"), allowed_token_ids=(120,))
    answers = run(engine, none_left, ask("fine", PATTERN))
    assert answers["none", 0].finish_reason == "error"
    assert "grammar" in answers["none", 0].error
    assert answers["fine", 0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            GrammarSpec("json_schema", '{"type": "array", "uniqueItems": true}', "json_schema"),
            "uniq",
        ),
        (GrammarSpec("regex", "a(", "regex"), "unclosed"),
        (GrammarSpec("lark", "start: other", "grammar"), "other"),
        (GrammarSpec("regex", "a" * 300_000, "regex"), "262,144"),
        (GrammarSpec("json_schema", "[" * 5000 + "]" * 5000, "guided_json"), "guided_json"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_words(tiny, spec, words):
    engine = engine_of(tiny)
    with pytest.raises(RequestError, match=words) as refused:
        engine.add(ask("a", spec))
    assert refused.value.param == spec.param
    assert not engine.has_work


def test_grammars_are_compiled_once_and_forgotten_in_order(monkeypatch):
    monkeypatch.setattr("kvweave.engine.sampling.grammar._MAX_CACHED", 2)
    compiler = GrammarCompiler(byte_tokenizer(), 261, [257])
    one, two, three = (GrammarSpec("regex", text) for text in ("a", "b", "c"))
    kept = compiler.compile(one)
    assert compiler.compile(GrammarSpec("regex", "a", "another_field")) is kept
    compiler.compile(two)
    assert compiler.compile(one) is kept
    compiler.compile(three)
    assert compiler.compile(one) is kept
    assert len(compiler._compiled) == 2


def test_masks_touch_their_rows_only():
    compiler = GrammarCompiler(byte_tokenizer(), 261, [257])
    matcher = compiler.matcher(compiler.compile(GrammarSpec("regex", "[ab]+")), {257, 7})
    logits = torch.zeros(3, 261)
    assert mask_logits(logits, [(1, matcher)]) == {}
    tokenizer = byte_tokenizer()
    letters = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert logits[1].isfinite().nonzero().squeeze(-1).tolist() == sorted(letters)
    assert logits[[0, 2]].isfinite().all()
    matcher.accept(letters[0])
    logits = torch.zeros(1, 261)
    mask_logits(logits, [(0, matcher)])
    assert logits[0].isfinite().nonzero().squeeze(-1).tolist() == sorted([*letters, 257, 7])


def test_unknown_formats_are_no_obstacle_and_constants_stay():
    compiler = GrammarCompiler(byte_tokenizer(), 261, [257])
    schema = {"type": "string", "format": "password"}
    compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
    constant = {"const": {"format": "password"}}
    matcher = compiler.compile(GrammarSpec("json_schema", json.dumps(constant))).deep_copy()
    text = byte_tokenizer()('{"format":"password"}')["input_ids"]
    assert matcher.try_consume_tokens(text) == len(text)


def test_others_get_tokens_while_a_grammar_is_compiled(tiny, monkeypatch):
    """Compilation is held up: requests without one go on, and those with one can go away."""
    engine = engine_of(tiny)
    compile_, gate = engine.grammars.compile, threading.Event()

    def slow(spec):
        assert gate.wait(30)
        return compile_(spec)

    monkeypatch.setattr(engine.grammars, "compile", slow)

    async def scenario():
        served = AsyncEngine(engine)
        await served.start()
        try:
            waits = served.generate(ask("waits", PATTERN))
            aborted = served.generate(ask("aborted", PATTERN))
            closed = served.generate(ask("closed", PATTERN))
            wrong = served.generate(ask("wrong", GrammarSpec("regex", "a(")))
            free = await answer_of(served.generate(ask("free", None, max_tokens=5)))
            assert len(free.token_ids) == 5
            served.abort("aborted")
            await closed.aclose()
            gate.set()
            assert re.fullmatch("(ab|c){3,6}", (await answer_of(waits)).text)
            assert (await answer_of(aborted)).finish_reason == "abort"
            with pytest.raises(RequestError, match="unclosed"):
                await answer_of(wrong)
            return await served.run_on_engine_thread(lambda engine: engine.snapshot())
        finally:
            await served.stop()

    snapshot = asyncio.run(scenario())
    assert snapshot.running == snapshot.waiting == snapshot.used_tokens == 0
    assert snapshot.requests == 3


def test_masks_that_are_computed_ahead_are_those_of_their_place():
    """In every order of calls: after a token, of a twin, and of the matcher that was copied."""
    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(tokenizer, 261, [257])
    compiled = compiler.compile(PATTERN)
    walk = tokenizer.convert_tokens_to_ids(list("abcab"))
    b, c = walk[1:3]

    def fresh(tokens):
        matcher = compiler.matcher(compiled, [257])
        for token in tokens:
            matcher.accept(token)
        return matcher.mask().copy()

    matcher = compiler.matcher(compiled, [257])
    for place, token in enumerate(walk):
        assert matcher.allowed_run([token, 257]) >= 1
        twin = matcher.twin()
        twin.accept(b if token == b else c)
        matcher.accept(token)
        assert (twin.mask() == fresh([*walk[:place], b if token == b else c])).all()
        assert (matcher.mask() == fresh(walk[: place + 1])).all()
        assert (matcher.mask() == matcher.twin().mask()).all()
    with pytest.raises(KvweaveError, match="cannot go on"):
        matcher.accept(walk[1])


SPECS = [
    JSON,
    PATTERN,
    GrammarSpec("regex", "[a-z ]{3,40}(!|[?]{2})?"),
    GrammarSpec("lark", 'start: "(" start ")" | /[0-9]+/'),
    GrammarSpec("json_schema", '{"type": "array", "items": {"enum": ["ab", "a", null, 1.5]}}'),
    GrammarSpec("json_schema", '{"anyOf": [{"type": "string", "maxLength": 9}, {"const": {}}]}'),
    GrammarSpec("json_schema", "{}"),
    *(GrammarSpec("json_schema", json.dumps({"type": kind})) for kind in ("number", "boolean")),
]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_what_is_surely_allowed_is_in_the_mask_and_nothing_else_but_ends(ignore_eos):
    """Of all tokens, at random places of all grammars."""
    compiler = GrammarCompiler(byte_tokenizer(), 261, [257])
    ending = {257} if ignore_eos else {257, 98}
    for number, spec in enumerate(SPECS):
        rng = np.random.default_rng(number)
        matcher = compiler.matcher(compiler.compile(spec), ending, ignore_eos=ignore_eos)
        for _ in range(12):
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[:261]
            sure = [matcher.surely_allows(token) for token in range(261)]
            expected = bits.astype(bool)
            expected[list(ending)] = False
            assert sure == expected.tolist()
            if not expected.any() or matcher.finished:
                break
            matcher.accept(int(rng.choice(np.flatnonzero(expected))))


def sampled_with_whole_masks(logits, states):
    """What `sample` chooses, by its definition: every forbidden logit is filled first."""
    for row, state in enumerate(states):
        bits = np.unpackbits(state.grammar.mask().view(np.uint8), bitorder="little")
        logits[row, torch.from_numpy(bits[: logits.shape[-1]] == 0)] = -torch.inf
    free = [SamplingState(state.params, (), (), state.seed) for state in states]
    for state, made in zip(states, free, strict=True):
        made.drawn = state.drawn
    return sample(logits, free)


def test_masks_that_are_left_out_change_no_choice():
    """Random logits, many of them equal or no numbers, at random places of all grammars."""
    rng = np.random.default_rng(0)
    compiler = GrammarCompiler(byte_tokenizer(), 261, [257])
    states = [
        SamplingState(
            SamplingParams(temperature=temperature, top_k=top_k, max_tokens=50),
            (),
            {257},
            seed,
            compiler.matcher(compiler.compile(spec), {257}),
        )
        for seed, spec in enumerate(SPECS)
        for temperature, top_k in ((0.0, 0), (1.0, 0), (0.7, 5))
    ]
    left_out = 0
    for _ in range(25):
        logits = torch.from_numpy(rng.integers(-3, 4, (len(states), 261)).astype(np.float32))
        for row, state in enumerate(states):
            bits = np.unpackbits(state.grammar.mask().view(np.uint8), bitorder="little")[:261]
            if rng.random() < 0.6:  # a model that knows its grammar
                logits[row, torch.from_numpy(np.flatnonzero(bits))] += 2
            elif rng.random() < 0.3:
                logits[row, int(rng.choice(np.flatnonzero(bits == 0)))] = torch.nan
        best = logits.argmax(dim=-1).tolist()
        left_out += sum(
            s.greedy and s.grammar.surely_allows(t) for s, t in zip(states, best, strict=True)
        )
        expected = sampled_with_whole_masks(logits.clone(), states)
        found = sample(logits.clone(), states)
        assert found.token_ids == expected.token_ids
        assert not found.errors
        assert not expected.errors
        for state, token in zip(states, found.token_ids, strict=True):
            state.record(token)
        states = [s for s, t in zip(states, found.token_ids, strict=True) if t != 257]
        states = [s for s in states if not s.grammar.finished]
    assert left_out > 20


@pytest.mark.parametrize("speculative", [SpeculativeConfig(), SpeculativeConfig(algorithm="NGRAM")])
def test_answers_are_those_of_whole_masks(tiny, monkeypatch, speculative):
    """Greedy and seeded, several at once, with log probabilities, drafts and preemptions."""
    letters = dict.fromkeys(byte_tokenizer()("abc 19")["input_ids"], 3.0)
    requests = [
        replace(
            ask(
                f"{number}/{temperature}/{n}",
                spec,
                max_tokens=40,
                temperature=temperature,
                n=n,
                seed=number,
                logprobs=2 if number % 2 else None,
                logit_bias=letters if number % 3 else None,
                frequency_penalty=0.5 if number % 3 == 1 else 0.0,
            ),
            priority=number,
        )
        for number, spec in enumerate(SPECS[:6])
        for temperature, n in ((0.0, 1), (0.0, 2), (0.9, 2))
    ]
    asked = []
    surely_allows = GrammarMatcher.surely_allows

    def watched(matcher, token):
        asked.append(surely_allows(matcher, token))
        return asked[-1]

    def serve():
        engine = engine_of(tiny, speculative=speculative, max_running_requests=4)
        answers = {}
        for request in requests:  # each is more urgent than those before it
            engine.add(request)
            for _ in range(3):
                for delta in engine.step():
                    answers.setdefault((delta.rid, delta.index), Completion()).extend(delta)
        run(engine, answers=answers)
        assert engine.snapshot().preemptions > 0
        return {
            key: (a.token_ids, [p.logprob for p in a.logprobs], a.finish_reason, a.error)
            for key, a in answers.items()
        }

    monkeypatch.setattr(GrammarMatcher, "surely_allows", watched)
    found = serve()
    assert 10 < sum(asked) < len(asked)
    monkeypatch.setattr(GrammarMatcher, "surely_allows", lambda matcher, token: False)
    expected = serve()
    assert set(found) == set(expected)
    for key, (ids, logprobs, *end) in found.items():
        assert (ids, end) == (expected[key][0], list(expected[key][2:]))
        assert logprobs == pytest.approx(expected[key][1], abs=1e-4)
