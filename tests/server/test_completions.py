"""POST /v1/completions: shapes, echo, log probabilities, several prompts and answers."""

import json

import pytest

from kvweave.engine.types import Usage
from kvweave.prefix.lease import Reuse, Span
from support.serverkit import TEXT, complete, events


def test_the_shape_of_an_answer(client):
    answer = complete(client, rid="mine")
    assert answer.pop("created") > 0
    assert answer == {
        "id": "cmpl-mine",
        "object": "text_completion",
        "model": "toy",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "text": TEXT[:9],
                "logprobs": None,
                "finish_reason": "length",
                "matched_stop": None,
            }
        ],
        "usage": {
            "prompt_tokens": 6,
            "completion_tokens": 9,
            "total_tokens": 15,
            "prompt_tokens_details": {
                "cached_tokens": 0,
                "moved_tokens": 0,
                "paraphrase_tokens": 0,
                "refreshed_tokens": 0,
                "session_tokens": 0,
                "shared_tokens": 0,
                "cache_write_tokens": 0,
            },
        },
    }


def test_every_spelling_of_a_prompt_reaches_the_engine_as_token_ids(client, engine):
    ids = client.post("/tokenize", json={"prompt": "ab"}).json()["tokens"]
    for prompt, expected in (
        ("ab", [ids]),
        (["ab", "ab"], [ids, ids]),
        (ids, [ids]),
        ([ids, ids[:1]], [ids, ids[:1]]),
    ):
        engine.requests.clear()
        answer = complete(client, prompt=prompt, max_tokens=1)
        assert [list(request.prompt_ids) for request in engine.requests] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))


def test_choices_of_several_prompts_with_n_are_in_order_and_prompts_count_once(client, engine):
    engine.answer = lambda request, index: f"{len(request.prompt_ids)}{index}"
    engine.usage = Usage(reuse=Reuse(exact=1, moved=2))
    answer = complete(client, prompt=["abc", "abcd"], n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["30", "31", "40", "41"]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert answer["usage"]["prompt_tokens_details"]["moved_tokens"] == 4


def test_sampling_fields_reach_the_engine(client, engine):
    complete(
        client,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=5,
        stop="x",
        stop_token_ids=[3],
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        min_tokens=2,
        ignore_eos=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        logit_bias={"5": -100},
        cache_salt="",
        priority=-3,
        fuzzy=False,
        fuzzy_semantic=False,
        user="ignored",
        unheard_of={"ignored": True},
    )
    [request] = engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.min_p, sampling.seed, sampling.stop) == (0.1, 5, ("x",))
    assert sampling.stop_token_ids == (3,)
    assert sampling.logit_bias == {5: -100.0}
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.1, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)
    assert sampling.ignore_eos
    assert not sampling.skip_special_tokens
    assert sampling.include_stop_str_in_output
    assert (request.cache_salt, request.priority, request.fuzzy) == ("", -3, False)
    assert not request.fuzzy_semantic


def test_null_is_as_good_as_silence(client, engine):
    complete(client, n=None, temperature=None, stop=None, stream=None, echo=None, cache_salt=None)
    [request] = engine.requests
    assert request.sampling.n == 1
    assert request.sampling.temperature == 1.0
    assert request.cache_salt is None
    assert request.fuzzy


def test_an_answer_of_16_tokens_is_the_default(client, engine):
    answer = client.post("/v1/completions", json={"prompt": "x"}).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_logprobs_are_four_parallel_lists(client, engine):
    engine.answer = lambda request, index: "a€b"
    [choice] = complete(client, logprobs=2)["choices"]
    scores = choice["logprobs"]
    assert scores["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert scores["text_offset"] == [0, 1, 2, 2, 2]
    assert scores["token_logprobs"] == [-9999.0] * 5  # what JSON has for minus infinity
    assert all(len(top) == 3 for top in scores["top_logprobs"])  # two, and the one chosen


def test_echo_repeats_the_prompt_with_its_scores(client, engine):
    answer = complete(client, prompt="abc", echo=True, logprobs=1, max_tokens=2, n=2)
    for choice in answer["choices"]:
        assert choice["text"] == "abcTh"
        assert choice["logprobs"]["tokens"] == ["a", "b", "c", "T", "h"]
        assert choice["logprobs"]["token_logprobs"][:2] == [None, -2.0]
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


def test_echo_of_token_ids_and_without_generation(client):
    ids = client.post("/tokenize", json={"prompt": "abc"}).json()["tokens"]
    [choice] = complete(client, prompt=ids, echo=True, max_tokens=0)["choices"]
    assert choice["text"] == "abc"
    assert choice["finish_reason"] == "length"


def test_a_stream_carries_the_same_text_and_ends_with_done(client):
    got = events(client)
    assert "".join(event["choices"][0]["text"] for event in got) == TEXT[:9]
    assert [event["choices"][0]["finish_reason"] for event in got][-1] == "length"
    assert all(event["object"] == "text_completion" for event in got)
    assert len({event["id"] for event in got}) == 1
    assert "usage" not in got[0]


def test_choices_of_a_stream_have_the_numbers_of_a_plain_answer(client, engine):
    engine.answer = lambda request, index: f"{len(request.prompt_ids)}{index}"
    texts = {}
    for event in events(client, prompt=["abc", "abcd"], n=2):
        [choice] = event["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "30", 1: "31", 2: "40", 3: "41"}


def test_a_stream_with_usage_ends_with_it_and_has_null_before(client, engine):
    engine.usage = Usage(reuse=Reuse(exact=4))
    *before, last = events(client, n=2, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in before)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 18
    assert last["usage"]["prompt_tokens"] == 6
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


def test_a_stream_can_carry_usage_all_the_way(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        event["usage"]["completion_tokens"] for event in events(client, stream_options=options)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 9


@pytest.mark.parametrize("late", [False, True])
def test_a_streamed_echo_scores_the_prompt_in_every_answer(client, engine, late):
    if late:  # answer 1 comes before answer 0
        engine.reversed_answers = True
    texts, scores = {}, {}
    for event in events(client, prompt="abc", echo=True, logprobs=0, n=2, max_tokens=2):
        [choice] = event["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        scores.setdefault(choice["index"], []).extend(choice["logprobs"]["text_offset"])
    assert texts == {0: "abcTh", 1: "abcTh"}
    assert scores == {0: [0, 1, 2, 3, 4], 1: [0, 1, 2, 3, 4]}


def test_the_plan_is_told_on_request(client, engine):
    engine.usage = Usage(reuse=Reuse(exact=2, moved=3))
    engine.plan = (Span(2, 3, 7, 40, shared=1),)
    expected = [
        {
            "prompt": 0,
            "start": 0,
            "length": 2,
            "tier": "exact",
            "donor": None,
            "donor_start": 0,
            "shared": 2,
            "generation": 0,
        },
        {
            "prompt": 0,
            "start": 2,
            "length": 3,
            "tier": "moved",
            "donor": "7",
            "donor_start": 40,
            "shared": 1,
            "generation": 0,
        },
    ]
    assert complete(client, return_plan=True, n=2)["kvweave_plan"] == expected
    assert "kvweave_plan" not in complete(client)
    streamed = [event["kvweave_plan"] for event in events(client, return_plan=True)[:1]]
    assert streamed == [expected]
    # Preempted before its first token, and less of its prefix was left when it came back.
    engine.usage = Usage(reuse=Reuse(exact=4, moved=3))
    assert complete(client, return_plan=True)["kvweave_plan"] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_served_otherwise_has_a_plan_of_its_own(client, engine, stream):
    engine.plan = (Span(2, 3, 7, 40),)
    engine.plans = {1: (Span(2, 5, 3, 7, generation=1),)}
    if stream:
        seen = [event.get("kvweave_plan", []) for event in events(client, return_plan=True, n=3)]
        plan = [span for spans in seen for span in spans]
    else:
        plan = complete(client, return_plan=True, n=3)["kvweave_plan"]
    told = [(span.get("answer"), span["donor"], span["length"]) for span in plan]
    assert sorted(told, key=str) == [(1, "s3", 5), (None, "7", 3)]


def test_a_slow_reader_gets_fewer_longer_pieces_and_the_whole_text(client, engine):
    body = {"prompt": "x", "max_tokens": 1500, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
    assert "".join(pieces) == (TEXT * 100)[:1500]


def test_a_matched_stop_is_named(client):
    [choice] = complete(client, stop=["brown", "never"], max_tokens=50)["choices"]
    assert choice["text"] == "The quick "
    assert choice["finish_reason"] == "stop"
    assert choice["matched_stop"] == "brown"
