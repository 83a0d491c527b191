"""What a request leaves out: the model's own sampling holds, or OpenAI's defaults."""

from dataclasses import replace

import pytest

from kvweave.config import ServerConfig
from support.serverkit import FakeEngine, RunningServer, complete, say, toy_card

OWN = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}


def sampled(config, *asked):
    """The parameters of each request as the engine got them; `asked` sends them."""
    engine = FakeEngine()
    card = replace(toy_card(engine.tokenizer), sampling=OWN)
    with RunningServer(engine, config, card) as server, server.client() as client:
        for ask in asked:
            ask(client)
    return [request.sampling for request in engine.requests]


def generate(client, **params):
    reply = client.post("/generate", json={"text": "x", "sampling_params": params})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "ask",
    [say, lambda client, **more: complete(client, prompt="x", **more), generate],
    ids=["chat", "completions", "generate"],
)
def test_the_models_own_sampling_holds_where_a_request_is_silent(ask):
    silent, said = sampled(
        ServerConfig(port=0), ask, lambda client: ask(client, temperature=0, top_k=-1)
    )
    assert {name: getattr(silent, name) for name in OWN} == OWN
    assert (said.temperature, said.top_k, said.repetition_penalty) == (0, -1, 1.1)


def test_openais_defaults_can_be_had_instead():
    [silent] = sampled(ServerConfig(port=0, sampling_defaults="openai"), say)
    assert (silent.temperature, silent.top_k, silent.repetition_penalty) == (1, -1, 1)
