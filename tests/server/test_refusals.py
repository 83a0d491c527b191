"""Refusals and failures: status, OpenAI's error shape, no effect on other requests."""

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest

from kvweave.config import ServerConfig
from kvweave.errors import EngineDeadError, RequestError
from kvweave.server.access import BodyLimit
from support.serverkit import CONTEXT, FakeEngine, RunningServer, toy_tokenizer

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_request")


def refusal(reply, status=400):
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not valid JSON"),
        (b'{"prompt": "x",}', "not valid JSON"),
        (b"\x80{}", "UTF-8"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b"[" * 50_000, "nested too deeply"),
        (b'{"a":' * 15_000, "nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", "number too long"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"null", "JSON object"),
        (b"", "missing"),
    ],
)
def test_bodies_that_are_no_json_object(client, path, body, words):
    reply = client.post(path, content=body, headers={"content-type": "application/json"})
    assert words in refusal(reply)["message"]


def test_a_body_without_a_content_type_is_read_and_another_type_is_not(client):
    assert client.post("/v1/completions", content=b'{"prompt": "x"}').status_code == 200
    reply = client.post(
        "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}
    )
    assert "application/json" in refusal(reply)["message"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prompt", None, "prompt is missing"),
        ("prompt", "", "empty"),
        ("prompt", [], "a string"),
        ("prompt", [[]], "empty"),
        ("prompt", [1, "a"], "a string"),
        ("prompt", [True], "a string"),
        ("prompt", [1.5], "a string"),
        ("prompt", {"a": 1}, "a string"),
        ("prompt", ["x"] * 1025, "at most 1024 prompts"),
        ("prompt", [-1], "outside 0 to"),
        ("prompt", [10**30], "outside 0 to"),
        ("prompt", "\ud800", "surrogate"),
        ("prompt", "x" * CONTEXT, f"has {CONTEXT} tokens"),
        ("prompt", "x" * 40_000, "context"),
        ("temperature", float("nan"), "finite"),
        ("temperature", float("inf"), "finite"),
        ("temperature", -0.1, "between 0 and 2"),
        ("temperature", 2.1, "between 0 and 2"),
        ("temperature", "hot", "number"),
        ("temperature", True, "number"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.1, "between 0 and 1"),
        ("top_k", -2, "between -1"),
        ("min_p", -1, "between 0 and 1"),
        ("max_tokens", -1, "between 0"),
        ("max_tokens", 1.5, "integer"),
        ("max_tokens", 10**12, "between 0"),
        ("n", 0, "between 1 and 128"),
        ("n", 10**6, "between 1 and 128"),
        ("seed", 2**80, "between"),
        ("logprobs", 21, "between 0 and 20"),
        ("logprobs", True, "integer"),
        ("presence_penalty", 3, "between -2 and 2"),
        ("repetition_penalty", 0, "between 0.01"),
        ("stop", [""], "must not be empty"),
        ("stop", ["x"] * 17, "at most 16"),
        ("stop", {"a": 1}, "string"),
        ("stop", "x" * 1025, "at most 1024 characters"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("stop_token_ids", [True], "integer"),
        ("stop_token_ids", [1] * 1025, "1024"),
        ("logit_bias", {"word": 1}, "'word' is no id"),
        ("logit_bias", {"5": 101}, "from -100 to 100"),
        ("logit_bias", {"5": True}, "no number"),
        ("logit_bias", [5], "a map"),
        ("logit_bias", {str(token): 1 for token in range(1025)}, "at most 1024"),
        ("logit_bias", {"5": float("nan")}, "from -100 to 100"),
        ("stream_options", {"include_usage": "yes"}, "boolean"),
        ("best_of", 3, "best_of"),
        ("suffix", "end", "suffix"),
        ("guided_whitespace_pattern", {"type": "object"}, "white space"),
        ("rid", "two words", "printable"),
        ("rid", "line\nbreak", "printable"),
        ("rid", "x" * 257, "printable"),
        ("cache_salt", "x" * 257, "256"),
        ("cache_salt", 5, "string"),
        ("cach_salt", "tenant", "did you mean cache_salt?"),
        ("cacheSalt", "tenant", "did you mean cache_salt?"),
        ("fuzy", False, "did you mean fuzzy?"),
        ("priority", "high", "integer"),
        ("priority", 2**40, "less than"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_fields_out_of_range(client, engine, field, value, words, stream):
    body = {"prompt": "x", "stream": stream, field: value}
    # json.dumps writes NaN and lone surrogates, as careless clients do.
    reply = client.post(
        "/v1/completions",
        content=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    error = refusal(reply)
    assert words in error["message"]
    assert error["param"].split(".")[0] == field
    assert not engine.requests


def test_all_wrong_fields_are_named(client):
    message = refusal(
        client.post("/v1/completions", json={"prompt": 5, "n": "two", "echo": "yes"})
    )["message"]
    assert all(name in message for name in ("prompt", "n:", "echo"))


def test_best_of_as_many_as_n_asks_for_nothing_more(client):
    reply = client.post("/v1/completions", json={"prompt": "x", "n": 2, "best_of": 2})
    assert reply.status_code == 200


def test_unknown_models_paths_and_methods(client):
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        error = refusal(
            client.post(
                path, json={**body, "model": "gpt\ud800".encode("utf-8", "replace").decode()}
            ),
            404,
        )
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert refusal(client.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert "/nowhere" in refusal(client.get("/nowhere"), 404)["message"]
    assert "GET" in refusal(client.get("/v1/completions"), 405)["message"]


def in_pieces(body):
    for start in range(0, len(body), 10_000):
        time.sleep(0.001)
        yield body[start : start + 10_000]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit(client, chunked):
    body = b'{"prompt": "' + b"x" * 200_000 + b'"}'
    content = in_pieces(body) if chunked else body
    reply = client.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    assert "100000 bytes" in refusal(reply, 413)["message"]


def test_a_body_announced_as_too_large_is_refused_before_it_comes(server):
    port = httpx.URL(server.url).port
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100001\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
        raw.sendall(head)
        assert raw.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_body_that_never_ends_times_out():
    async def trickle():
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def app(scope, receive, send):
        while True:
            await receive()

    async def drive():
        gate = BodyLimit(app, max_bytes=10**9, max_seconds=0.1)
        await gate({"type": "http", "headers": []}, trickle, None)

    with pytest.raises(Exception, match=r"within 0.1 seconds"):
        asyncio.run(drive())


def test_a_full_queue_answers_429_and_when_to_come_back(client, engine):
    engine.capacity = 0
    for stream in (False, True):
        reply = client.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert refusal(reply, 429)["code"] == "queue_full"
        assert reply.headers["retry-after"] == "3"


def test_one_prompt_that_finds_no_room_ends_the_whole_request(client, engine):
    engine.capacity = 2
    reply = client.post("/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 500})
    refusal(reply, 429)


@pytest.mark.parametrize("phase", ["submit", "queue", "prefill", "decode"])
@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (RequestError("the pool is too small for 9 tokens", param="prompt"), 400),
        (EngineDeadError("the engine has stopped"), 503),
        (RuntimeError("secret details"), 500),
    ],
)
def test_failures_in_every_phase(client, engine, phase, failure, status):
    engine.failure[phase] = failure
    body = {"prompt": "x", "max_tokens": 3}
    message = refusal(client.post("/v1/completions", json=body), status)["message"]
    assert "secret" not in message
    reply = client.post("/v1/completions", json={**body, "stream": True})
    if phase != "decode":
        assert refusal(reply, status)["message"] == message
    else:  # too late for a status: an event says it
        lines = [line for line in reply.text.split("\n") if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["message"] == message


def test_an_answer_that_the_engine_gives_up(client, engine):
    engine.error_after = 2
    body = {"prompt": "x", "max_tokens": 5}
    assert "step broke" in refusal(client.post("/v1/completions", json=body), 500)["message"]
    reply = client.post("/v1/completions", json={**body, "stream": True})
    assert "step broke" in reply.text
    engine.error_after = None
    assert client.post("/v1/completions", json=body).status_code == 200


def test_a_rid_cannot_be_used_twice_at_once_but_again_afterwards(server, client, engine):
    engine.hold = "decode"
    body = {"prompt": "x", "rid": "twin", "max_tokens": 3}
    with (
        server.client() as other,
        other.stream("POST", "/v1/completions", json={**body, "stream": True}),
    ):
        error = refusal(client.post("/v1/completions", json=body))
        assert error["param"] == "rid"
        engine.hold = None
    for _ in range(20):
        assert client.post("/v1/completions", json=body).status_code == 200


def test_a_model_without_a_chat_template_says_so():
    engine = FakeEngine(toy_tokenizer(template=None))
    with RunningServer(engine, ServerConfig(port=0)) as server, server.client() as client:
        body = {"messages": [{"role": "user", "content": "x"}]}
        reply = client.post("/v1/chat/completions", json=body)
        assert "no chat template" in refusal(reply)["message"]


def test_every_path_but_health_needs_the_api_key():
    config = ServerConfig(port=0, api_key="s3crét")
    with RunningServer(FakeEngine(), config) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/server_info", "/flush_cache", "/openapi.json"):
            assert refusal(client.get(path), 401)["code"] == "invalid_api_key"
        for wrong in ("Bearer", "Bearer s3cret", "Basic s3crét", "Bearer s3crét2"):
            headers = {"Authorization": wrong.encode()}
            assert client.get("/v1/models", headers=headers).status_code == 401
        for right in ("Bearer s3crét", "bearer  s3crét"):
            headers = {"Authorization": right.encode()}
            assert client.get("/v1/models", headers=headers).status_code == 200
        info = client.get("/server_info", headers={"Authorization": "Bearer s3crét".encode()})
        assert info.json()["api_key"] is True
        assert "s3cr" not in info.text


def test_garbage_instead_of_http_does_not_hurt(server, client):
    port = httpx.URL(server.url).port
    for garbage in (
        b"\x16\x03\x01\x02",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /health\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
            raw.sendall(garbage)
            raw.recv(1000)
    assert client.get("/health").status_code == 200


def test_refusals_start_no_threads():
    with RunningServer(FakeEngine(), ServerConfig(port=0)) as server, server.client() as client:
        before = set(threading.enumerate())
        for body, status in ((b"{", 400), (b'{"prompt": "x", "n": 0}', 400)):
            refusal(client.post("/v1/completions", content=body), status)
        assert client.get("/nowhere").status_code == 404
        started = set(threading.enumerate()) - before
        assert not [each.name for each in started if "AnyIO" in each.name]
