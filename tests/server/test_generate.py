"""SGLang's /generate: shapes of answers, sampling_params, log probabilities, streams."""

import json
from itertools import pairwise

import pytest

from kvweave.engine.types import Usage
from kvweave.errors import OverloadedError
from kvweave.prefix.lease import Reuse
from support.serverkit import TEXT, eventually

SHORT = {"max_new_tokens": 4}


def generate(client, **body):
    reply = client.post("/generate", json={"sampling_params": SHORT, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_an_answer(client, engine):
    engine.usage = Usage(reuse=Reuse(exact=3, moved=2))
    answer = generate(client, text="Say it", rid="mine", cache_salt="me")
    facts = answer["meta_info"]
    assert answer["text"] == TEXT[:4]
    assert answer["output_ids"] == engine.tokenizer(TEXT[:4])["input_ids"]
    assert facts.pop("e2e_latency") > 0
    assert facts == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 6,
        "completion_tokens": 4,
        "cached_tokens": 3,
        "moved_tokens": 2,
        "paraphrase_tokens": 0,
        "refreshed_tokens": 0,
        "session_tokens": 0,
        "shared_tokens": 0,
    }
    assert engine.requests[0].cache_salt == "me"


def test_token_ids_and_lists(client, engine):
    engine.answer = lambda request, index: f"{len(request.prompt_ids)}{index}"
    assert generate(client, input_ids=[1, 2])["text"] == "20"
    assert [each["text"] for each in generate(client, input_ids=[[1], [1, 2, 3]])] == ["10", "30"]
    several = generate(client, text=["a", "bc"], sampling_params={"n": 2})
    assert [each["text"] for each in several] == ["10", "11", "20", "21"]
    own = [{"max_new_tokens": 1}, {"max_new_tokens": 2, "temperature": 0}]
    assert [each["text"] for each in generate(client, text=["a", "b"], sampling_params=own)] == [
        "1",
        "10",
    ]
    assert isinstance(generate(client, text=["a"]), list)


def test_sampling_params_have_sglangs_names_and_defaults(client, engine):
    generate(client, text="x", sampling_params={})
    assert engine.requests[-1].sampling.max_tokens == 128
    generate(
        client,
        text="x",
        sampling_params={
            "max_new_tokens": 5,
            "min_new_tokens": 2,
            "sampling_seed": 9,
            "no_stop_trim": True,
            "stop": "z",
            "top_k": 3,
            "stop_token_ids": [7],
            "ignore_eos": True,
            "stream": True,
            "cache_salt": "not here",
        },
    )
    request = engine.requests[-1]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (5, 2, 9)
    assert (sampling.stop, sampling.top_k, sampling.stop_token_ids) == (("z",), 3, (7,))
    assert sampling.include_stop_str_in_output
    assert sampling.ignore_eos
    assert request.cache_salt is None


def test_stop_strings_are_named(client, engine):
    engine.answer = lambda request, index: "One. Two."
    answer = generate(client, text="x", sampling_params={"stop": ["Two"]})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "Two"}


def test_log_probabilities(client):
    facts = generate(client, text="abc", return_logprob=True, top_logprobs_num=2)["meta_info"]
    assert facts["input_token_logprobs"] == facts["input_top_logprobs"] == []
    ids = [entry[1] for entry in facts["output_token_logprobs"]]
    assert len(ids) == len(facts["output_top_logprobs"]) == 4
    assert facts["output_token_logprobs"][0] == [-9999.0, ids[0], None]
    assert facts["output_top_logprobs"][0] == [[-0.5, 0, None], [-1.5, 1, None]]
    facts = generate(
        client,
        text="abc",
        return_logprob=True,
        logprob_start_len=1,
        return_text_in_logprobs=True,
        sampling_params={"max_new_tokens": 1, "n": 2},
    )[1]["meta_info"]
    assert [(value, text) for value, _, text in facts["input_token_logprobs"]] == [
        (-2.0, "b"),
        (-2.0, "c"),
    ]
    assert "input_top_logprobs" not in facts


def streamed(client, **body):
    body = {"sampling_params": SHORT, "stream": True, **body}
    with client.stream("POST", "/generate", json=body) as reply:
        assert reply.status_code == 200
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_events_hold_all_of_an_answer_so_far(client, engine):
    plain = generate(client, text="x")
    events = streamed(client, text="x")
    texts = [event["text"] for event in events]
    assert texts[-1] == plain["text"]
    assert all(then.startswith(text) for text, then in pairwise(texts))
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (
        len(events) - 1
    )
    last = {**events[-1]["meta_info"], "id": 0, "e2e_latency": 0}
    assert last == {**plain["meta_info"], "id": 0, "e2e_latency": 0}
    assert "index" not in events[0]


def test_events_of_several_answers_are_numbered(client, engine):
    engine.answer = lambda request, index: f"{len(request.prompt_ids)}{index}"
    events = streamed(client, text=["a", "bc"], sampling_params={"n": 2})
    last = {event["index"]: event["text"] for event in events}
    assert last == {0: "10", 1: "11", 2: "20", 3: "21"}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("text", {}),
        ("text", {"text": "x", "input_ids": [1]}),
        ("input_ids", {"input_ids": [10_000]}),
        ("text", {"text": "x" * 5000}),
        ("sampling_params", {"text": ["a", "b"], "sampling_params": [{}]}),
        (
            "sampling_params.max_new_tokens",
            {"text": "x", "sampling_params": {"max_new_tokens": -1}},
        ),
        ("sampling_params.temperature", {"text": "x", "sampling_params": {"temperature": "hot"}}),
        ("sampling_params.stop_regex", {"text": "x", "sampling_params": {"stop_regex": "a"}}),
        ("lora_path", {"text": "x", "lora_path": "a"}),
        ("image_data", {"text": "x", "image_data": "a"}),
        ("return_hidden_states", {"text": "x", "return_hidden_states": True}),
        ("token_ids_logprob", {"text": "x", "token_ids_logprob": [1]}),
        ("max_tokens", {"text": "x", "max_tokens": 3}),
    ],
)
def test_what_is_refused_says_where(client, engine, field, body):
    reply = client.post("/generate", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field
    assert not engine.requests


def test_empty_lists_are_refused(client):
    for body in ({"text": []}, {"input_ids": []}, {"input_ids": [[]]}):
        assert client.post("/generate", json=body).status_code == 400


def test_failures(client, engine):
    engine.failure["submit"] = OverloadedError("the queue is full", retry_after=3)
    assert client.post("/generate", json={"text": "x"}).status_code == 429
    engine.failure = {}
    engine.error_after = 2
    events = streamed(client, text="x")
    assert events[-1]["error"]["message"] == "step broke"


def test_a_client_that_leaves_ends_its_request(server, engine):
    engine.hold = "decode"
    body = {"text": "x", "stream": True}
    with server.client() as client, client.stream("POST", "/generate", json=body) as reply:
        next(reply.iter_lines())
    assert eventually(lambda: not engine.phases)
