"""Reordering of a message's parts over HTTP: orders, reports, refusals."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest

from kvweave.config import ServerConfig
from kvweave.engine.types import GenerateRequest
from kvweave.reorder import SeenPrompts
from support.serverkit import FakeEngine, RunningServer, toy_tokenizer

A, B, C = "Apples are red.", "Bananas are not.", "Cherries are, too."


def message(*texts: str, role: str = "user") -> dict:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


@pytest.fixture
def ask(client, engine):
    """Ask, and return the answer with the request that reached the engine."""

    def ask(*messages: dict, **more: object) -> tuple[dict, GenerateRequest]:
        body = {"messages": messages, "max_tokens": 2, **more}
        reply = client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json(), engine.requests[-1]

    return ask


def learn(engine: FakeEngine, request: GenerateRequest) -> None:
    engine.known.add(np.array(request.prompt_ids, np.int32))


def test_the_known_order_is_taken_and_the_model_reads_it_as_if_sent_so(ask, engine):
    _, earlier = ask(message("Fruit.", C, A, B, "Which is yellow?"))
    learn(engine, earlier)
    answer, request = ask(
        message("Fruit.", A, B, C, "Which is red?"), reorder={"parts": [1, 2, 3]}, cache_salt="me"
    )
    _, sent_so = ask(message("Fruit.", C, A, B, "Which is red?"))
    assert request.prompt_ids == sent_so.prompt_ids
    shared = len(f"<|start|>user\nFruit.\n{C}\n{A}\n{B}\nWhich is ") - len("<|start|>") + 1
    assert answer["kvweave_order"] == {
        "message": 0,
        "parts": [3, 1, 2],
        "cached_tokens": shared,
        "cached_tokens_as_given": len("\nuser\nFruit.\n"),
    }
    assert set(engine.salts) == {"me"}


def test_unknown_parts_stay_as_given_and_the_report_says_so(ask):
    answer, request = ask(message(B, A, C), reorder={"parts": [2, 0, 1]})
    _, plain = ask(message(B, A, C))
    assert request.prompt_ids == plain.prompt_ids
    assert answer["kvweave_order"]["parts"] == [0, 1, 2]
    assert answer["kvweave_order"]["cached_tokens"] == 0


def test_no_report_without_a_request_to_reorder(ask, engine):
    for more in ({}, {"reorder": None}):
        answer, _ = ask(message(B, A), **more)
        assert "kvweave_order" not in answer
    assert engine.salts == []


def test_only_the_declared_parts_of_the_declared_message_move(ask, engine):
    system, told = message(C, B, A, role="system"), message(A, B, C)
    _, earlier = ask(system, message(B, A, C))
    learn(engine, earlier)
    answer, request = ask(system, told, reorder={"message": 1, "parts": [0, 1]})
    assert request.prompt_ids == earlier.prompt_ids
    assert (answer["kvweave_order"]["message"], answer["kvweave_order"]["parts"]) == (1, [1, 0])


def test_other_messages_stay_in_place(ask, engine):
    after = [{"role": "assistant", "content": "Yes."}, message("Why?")]
    _, earlier = ask(message("Well:", B, A), *after)
    learn(engine, earlier)
    told = message("Well:", A, B)
    answer, request = ask(told, *after, reorder={"message": 0, "parts": [1, 2]})
    assert request.prompt_ids == earlier.prompt_ids
    assert answer["kvweave_order"]["parts"] == [2, 1]


def test_the_tail_decides_between_two_known_orders(ask, engine):
    for texts in ((A, B, "Which is blue?"), (B, A, "Which is red?")):
        _, earlier = ask(message(*texts))
        learn(engine, earlier)
    answer, request = ask(message(A, B, "Which is red?"), reorder={"parts": [0, 1]})
    assert request.prompt_ids == earlier.prompt_ids
    assert answer["kvweave_order"]["parts"] == [1, 0]


def test_other_fields_of_the_message_stay(ask, engine):
    named = {**message(A, B), "name": "Ann"}
    _, request = ask(named, reorder={"parts": [0, 1]})
    _, plain = ask(named)
    assert request.prompt_ids == plain.prompt_ids


def test_an_order_that_is_evicted_meanwhile_is_not_used(ask, engine, monkeypatch):
    _, plain = ask(message(A, B))
    _, earlier = ask(message(B, A))
    learn(engine, earlier)

    async def once(at):
        found, engine.known = at(engine), SeenPrompts()
        return found

    monkeypatch.setattr(engine, "run_on_engine_thread", once)
    answer, request = ask(message(A, B), reorder={"parts": [0, 1]})
    assert request.prompt_ids == plain.prompt_ids
    assert answer["kvweave_order"]["parts"] == [0, 1]
    assert answer["kvweave_order"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("messages", "reorder", "param", "words"),
    [
        ([message(A, B)], {"parts": [0, 2]}, "reorder.parts", "names part 2"),
        ([message(A, B)], {"parts": [-1, 0]}, "reorder.parts", "names part -1"),
        ([message(A, B, C)], {"parts": [0, 2]}, "reorder.parts", "neighbours"),
        ([message(A, B, C)], {"parts": [0, 0, 1]}, "reorder.parts", "each named once"),
        ([message(A, B)], {"parts": [0]}, "reorder.parts", "at least 2"),
        ([message(*"a" * 80)], {"parts": [*range(65)]}, "reorder.parts", "at most 64"),
        ([message(A, B)], {}, "reorder.parts", "missing"),
        ([message(A, B)], {"parts": ["0", "1"]}, "reorder.parts.0", "integer"),
        ([message(A, B)], {"parts": [0, 1], "message": 1}, "reorder.message", "from 0 to 0"),
        ([message(A, B)], {"parts": [0, 1], "message": -1}, "reorder.message", "is -1"),
        ([message(A, B)], {"parts": [0, 1], "order": "best"}, "reorder.order", "not permitted"),
        ([message(A, B)], True, "reorder", "dictionary"),
        (
            [message(A, B), {"role": "user", "content": "Well?"}],
            {"parts": [0, 1]},
            "reorder.message",
            "messages.1.content, which is not a list of parts",
        ),
    ],
)
def test_declarations_that_make_no_sense_are_refused_in_words(
    client, engine, messages, reorder, param, words
):
    reply = client.post("/v1/chat/completions", json={"messages": messages, "reorder": reorder})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert words in error["message"]
    assert error["param"] == param
    assert engine.requests == []


def test_completions_have_no_parts(client):
    body = {"prompt": "x", "reorder": {"parts": [0, 1]}}
    error = client.post("/v1/completions", json=body).json()["error"]
    assert error["param"] == "reorder"
    assert "chat" in error["message"]


def test_a_template_that_writes_parts_twice_is_told():
    twice = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    with RunningServer(FakeEngine(toy_tokenizer(twice)), ServerConfig(port=0)) as server:
        body = {"messages": [message(A, B)], "reorder": {"parts": [0, 1]}}
        with server.client() as client:
            error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert "chat template does not write" in error["message"]
    assert error["param"] == "reorder"


def test_a_stream_tells_the_order_once_in_its_first_event(server, engine):
    ai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    stream = ai.chat.completions.create(
        model="toy",
        messages=[message(A, B)],
        max_tokens=4,
        n=2,
        stream=True,
        extra_body={"reorder": {"parts": [0, 1]}},
    )
    orders = [chunk.model_dump().get("kvweave_order") for chunk in stream]
    assert orders[0]["parts"] == [0, 1]
    assert orders[1:] == [None] * (len(orders) - 1)


def test_the_openapi_document_has_it(client):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    assert json.dumps(schemas["ChatBody"]["properties"]["reorder"]).count("Reorder") == 1
    assert set(schemas["Reorder"]["properties"]) == {"message", "parts"}
