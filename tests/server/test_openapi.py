"""Fuzzes every operation of the OpenAPI document and validates the responses."""

from collections import Counter

import pytest

from kvweave.config import ServerConfig
from kvweave.engine.async_engine import AsyncEngine
from kvweave.explorer.routes import build_app
from kvweave.server.grammars import FIELDS
from support.enginekit import make_world
from support.serverkit import FakeEngine, RunningServer, eventually, toy_card, toy_tokenizer

schemathesis = pytest.importorskip("schemathesis", reason="it needs Python 3.11")

KEY = "k"


def published(config, examples):
    """The document that a server of this configuration publishes."""
    engine = FakeEngine()
    document = build_app(engine, toy_card(engine.tokenizer), config).openapi()
    del document["paths"]["/v1/embeddings"]  # its model takes seconds to load
    for body in document["components"]["schemas"].values():
        if "model" in body.get("properties", ()) and body["title"].endswith("Body"):
            # Values that depend on the model have tests of their own.
            body["properties"]["model"] = {"enum": ["toy", None]}
            # So have grammars, of which a request has one.
            for field in (
                *(set(FIELDS) - {"response_format"}),
                *("tools", "documents", "reasoning_effort", "allowed_token_ids"),
                *("output_config", "thinking", "reasoning", "text"),
            ):
                if field in body["properties"]:
                    body["properties"][field] = {"type": "null"}
    fuzzing = {
        "seed": 7,
        "generation": {"deterministic": True, "database": "none", "max-examples": examples},
        # A schema cannot say all that a request must keep to, and null is as good as silence.
        "checks": {
            "positive_data_acceptance": {"enabled": False},
            "negative_data_rejection": {"enabled": False},
        },
    }
    return schemathesis.openapi.from_dict(document, config=schemathesis.Config.from_dict(fuzzing))


SCRIPTED = ServerConfig(port=0, max_body_bytes=100_000, explorer=False)
PRETENDED = ServerConfig(port=0, api_key=KEY)


@pytest.fixture(scope="module")
def scripted():
    engine = FakeEngine()
    engine.answer = lambda request, index: "Many words."
    with RunningServer(engine, SCRIPTED) as server:
        yield server
        assert eventually(lambda: not engine.phases)


@pytest.fixture(scope="module")
def pretended():
    """The engine itself, in little room, with a model that reports what it should not be asked."""
    world = make_world("fuzzy_match", page_size=4, pool_tokens=512, max_queued_requests=8)
    # Of its tokenizer's tokens the model knows letters only, none of a template's own.
    template = "{% for message in messages %}{{ message.content }}{% endfor %}!"
    tokenizer = world.engine.loaded.tokenizer = toy_tokenizer(template)
    with RunningServer(AsyncEngine(world.engine), PRETENDED, toy_card(tokenizer)) as server:
        yield server
        assert eventually(lambda: not server.app.state.service.live)
    world.assert_idle()
    assert world.runner.violations == []


seen = Counter()


def check(response):
    kind = response.headers.get("content-type", [""])[0].split(";")[0]
    seen[response.status_code, kind] += 1
    if response.request.method == "HEAD":
        return
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "\n" not in error["message"]
    if kind == "text/event-stream":
        named = response.text.startswith("event: ")  # as Responses and Messages have it
        assert named or response.text.endswith("data: [DONE]\n\n")


@published(SCRIPTED, examples=3).parametrize()
def test_a_scripted_engine(case, scripted):
    check(case.call_and_validate(base_url=scripted.url))


@published(PRETENDED, examples=3).parametrize()
def test_a_pretended_model(case, pretended):
    headers = {"Authorization": f"Bearer {KEY}"}
    check(case.call_and_validate(base_url=pretended.url, headers=headers))


def test_fuzzing_met_answers_streams_and_refusals():
    assert {status for status, _ in seen} >= {200, 400, 404, 405}
    assert seen[200, "text/event-stream"] > 0
