"""Tenants cannot learn what others have cached.

Two servers differ only in what tenant A sent them. Whatever B then sends, both must answer the
same, to the byte: bodies, headers, plans, orders, errors. `kvweave bench salts` measures time.
"""

import json
import re

import pytest
from tokenizers import normalizers

from kvweave.config import ServerConfig, validate
from kvweave.engine.async_engine import AsyncEngine
from kvweave.errors import ConfigError
from kvweave.server.access import CLIENTS_PATHS, OPEN_PATHS
from support.enginekit import EOS, make_world
from support.serverkit import FakeEngine, RunningServer, toy_card, toy_tokenizer

KEY, OPERATORS = {"Authorization": "Bearer client"}, {"Authorization": "Bearer operator"}
CONFIG = ServerConfig(port=0, api_key="client", admin_api_key="operator")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}!"
SECRET = [(7 * n * n + 3 * n) % EOS for n in range(120)]
OTHER = [(5 * n * n + n + 11) % EOS for n in range(120)]
PARTS = ["alpha" * 8, "beta" * 10, "gamma" * 8]


def serve(backend):
    world = make_world(backend, page_size=4, pool_tokens=4096)
    tokenizer = world.engine.loaded.tokenizer = toy_tokenizer(TEMPLATE)
    # The pretended model knows letters only, and parts of a message are joined by line ends.
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\n", "~")
    return world, RunningServer(AsyncEngine(world.engine), CONFIG, toy_card(tokenizer))


def ask(client, prompt, rid, salt, path="/v1/completions", **more):
    body = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_plan": True}
    body |= {"prompt": prompt} if prompt is not None else {}
    body |= {"rid": rid, **({"cache_salt": salt} if salt is not None else {}), **more}
    return client.post(path, json=body, headers=KEY)


def probes(client, salt, rid):
    """Everything that B may ask, told by rid; B knows or guesses the text that A may have sent."""

    def of(name, prompt, **more):
        return ask(client, prompt, f"{rid}-{name}", salt, **more)

    yield of("same", [*SECRET, 1, 2, 3])
    yield of("prefix", SECRET[:64] + [9] * 9)
    yield of("moved", [80, 81, 82] + SECRET + [4] * 9)
    yield of("again", [*SECRET, 1, 2, 3])
    yield of("moved-again", [70] * 7 + SECRET + [5] * 9)
    # Of one token, since what becomes one event depends on how fast it is read.
    counted = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 1}
    yield of("stream", [*SECRET, 6], **counted)
    yield of("many", [SECRET, SECRET[8:], [3, *SECRET]], n=2)
    yield of("echo", SECRET, echo=True, logprobs=2)
    yield of("other", OTHER)
    for order in ((0, 1, 2), (2, 0, 1)):
        content = [{"type": "text", "text": PARTS[at]} for at in order]
        messages = [{"role": "user", "content": content}]
        chat = {"messages": messages, "reorder": {"parts": [0, 1, 2]}}
        yield of(f"reorder-{order[0]}", None, path="/v1/chat/completions", **chat)
    yield of("long", SECRET * 40)
    yield of("wrong", [10**6])
    yield client.post("/abort_request", json={"rid": "a-0"}, headers=KEY)
    for path in ("/v1/models", "/health", "/model_info", "/metrics", "/server_info", "/get_load"):
        yield client.get(path, headers=KEY)
    for path in ("/explorer/api/overview", "/explorer/api/tree", "/explorer/api/prompts/1"):
        yield client.get(path, headers=KEY)


def seen(reply):
    """What can be compared of an answer: all but clocks."""
    headers = {name: value for name, value in reply.headers.items() if name != "date"}
    body = re.sub(r'"created":\d+', '"created":0', reply.text)
    headers.pop("content-length", None)  # of which `created` is part
    return reply.status_code, headers, body


def answers_to(backend, sent, salt_of_b):
    """What B sees where A had sent `sent` before."""
    world, server = serve(backend)
    with server, server.client() as client:
        for n, prompt in enumerate((sent, [*sent, 1, 2, 3], [8, *sent])):
            assert ask(client, prompt, f"a-{n}", "tenant A").status_code == 200
        parts = PARTS if sent is SECRET else [part[::-1].upper() for part in PARTS]
        content = [{"type": "text", "text": part} for part in parts]
        chat = {"messages": [{"role": "user", "content": content}]}
        reply = ask(client, None, "a-chat", "tenant A", path="/v1/chat/completions", **chat)
        assert reply.status_code == 200
        found = [seen(reply) for reply in probes(client, salt_of_b, "b")]
        metrics = client.get("/metrics", headers=OPERATORS).text
    world.assert_idle()
    assert world.runner.violations == []
    return found, metrics


@pytest.mark.parametrize(
    ("backend", "salt"),
    [("hash", "tenant B"), ("radix", "tenant B"), *(("fuzzy_match", s) for s in ("", None))],
)
def test_a_tenant_sees_nothing_of_what_another_one_cached(backend, salt):
    guessed, their_metrics = answers_to(backend, SECRET, salt)
    missed, other_metrics = answers_to(backend, OTHER, salt)
    assert guessed == missed
    statuses = [status for status, _, _ in guessed]
    assert statuses.count(200) >= 12
    first = json.loads(guessed[0][2])
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = json.loads(guessed[3][2])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100, "B's own is found"
    # Not even what counts tokens tells: A had as many of its own, whatever they were.
    counted = [line for line in their_metrics.splitlines() if "tokens_total{" in line]
    assert counted == [line for line in other_metrics.splitlines() if "tokens_total{" in line]


def test_requests_without_a_salt_share():
    """What docs/reliability.md warns of."""
    _world, server = serve("radix")
    with server, server.client() as client:
        ask(client, SECRET, "a", None)
        details = ask(client, [*SECRET, 1], "b", None).json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 120


@pytest.fixture(scope="module")
def guarded():
    with RunningServer(FakeEngine(), CONFIG) as server, server.client() as client:
        yield client


def test_client_keys_open_client_paths_and_operator_keys_all(guarded):
    document = guarded.get("/openapi.json", headers=KEY).json()
    asked = 0
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            url = path.replace("{name}", "toy").replace("{number}", "1")
            if path in OPEN_PATHS:
                assert guarded.request(method, url).status_code == 200
                continue
            clients = path in CLIENTS_PATHS or path.startswith("/v1/")
            assert guarded.request(method, url).status_code == 401
            refused = guarded.request(method, url, headers=KEY)
            assert (refused.status_code == 403) == (not clients), path
            assert ("403" in operation["responses"]) == (not clients)
            if not clients:
                assert refused.json()["error"]["code"] == "operators_only"
            if path not in ("/explorer/api/tree",):  # which the scripted engine has none of
                assert guarded.request(method, url, headers=OPERATORS).status_code in (
                    200,
                    400,
                    404,
                )
            asked += 1
    assert asked > 15
    assert guarded.get("/nowhere", headers=KEY).status_code == 403
    assert guarded.get("/explorer").status_code == 200
    wrong = {"Authorization": "Bearer client2"}
    assert guarded.get("/metrics", headers=wrong).status_code == 401
    shown = guarded.get("/server_info", headers=OPERATORS)
    assert shown.json()["admin_api_key"] is True
    assert "operator" not in shown.text


def test_an_operators_key_alone_leaves_clients_without_one():
    config = ServerConfig(port=0, admin_api_key="operator")
    with RunningServer(FakeEngine(), config) as server, server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers=OPERATORS).status_code == 200
        operation = client.get("/openapi.json").json()["paths"]["/v1/models"]["get"]
        assert "401" not in operation["responses"]


def test_keys_that_cannot_be_meant():
    with pytest.raises(ConfigError, match="--admin-api-key must not be empty"):
        validate(ServerConfig(admin_api_key=""))
    with pytest.raises(ConfigError, match="must differ from --api-key"):
        validate(ServerConfig(api_key="k", admin_api_key="k"))
    assert ServerConfig(host="0.0.0.0").hides_text
    assert not ServerConfig(host="0.0.0.0", admin_api_key="k").hides_text
