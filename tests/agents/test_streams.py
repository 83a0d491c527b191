"""Streams that arrive in random pieces, put together by each client, equal the plain answers."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from kvweave.config import ServerConfig
from support.agents import LOOK, SCHEMA, torn
from support.serverkit import FakeEngine, RunningServer, toy_tokenizer

TEMPLATE = (
    "{# <think></think> #}{{ tools | length if tools else 0 }} tools\n"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
)
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"name": "naïve } \\"é\\"", "distance": 7}}\n'
    '</tool_call>\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
)
ANSWERS = {
    "text": "Ça va, 世界? data: {}\n\nevent: 😀",
    "calls": CALLS,
    "all": f"<think>Hm, ž.</think>Well — see.\n{CALLS}",
}
ASKED = [{"role": "user", "content": "Where?"}]
MISSING = "make test-agents installs it"


@pytest.fixture(scope="module")
def served():
    with RunningServer(FakeEngine(toy_tokenizer(TEMPLATE)), ServerConfig(port=0)) as server:
        yield server


@pytest.fixture(params=sorted(ANSWERS))
def url(served, request):
    served.engine.reset()
    served.engine.answer = lambda generation, index: ANSWERS[request.param]
    with torn(served.url, seed=len(request.param)) as url:
        yield url


def without_ids(value):
    """Ids are new in every answer, and streams are known by other facts than answers."""
    dropped = ("id", "call_id", "index", "parsed", "parsed_arguments", "parsed_output", "created")
    if isinstance(value, dict):
        return {
            name: without_ids(each)
            for name, each in value.items()
            if name not in dropped and each is not None
        }
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def test_openai_chat(url):
    ai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = {"model": "toy", "messages": ASKED, "tools": [LOOK]}
    plain = ai.chat.completions.create(**asked).choices[0]
    with ai.chat.completions.stream(**asked) as stream:
        whole = stream.get_final_completion().choices[0]
    assert without_ids(whole.to_dict()) == without_ids(plain.to_dict())


def test_openai_responses(url):
    ai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = {"model": "toy", "input": "Where?", "tools": [{"type": "function", **LOOK["function"]}]}
    plain = ai.responses.create(**asked)
    with ai.responses.stream(**asked) as stream:
        whole = stream.get_final_response()
    assert without_ids(whole.to_dict()["output"]) == without_ids(plain.to_dict()["output"])


def test_anthropic(url):
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tool = {"name": "look", "input_schema": SCHEMA}
    asked = {"model": "toy", "messages": ASKED, "tools": [tool], "max_tokens": 900}
    plain = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        whole = stream.get_final_message()
    assert without_ids(whole.to_dict()) == without_ids(plain.to_dict())


@pytest.mark.agents
@pytest.mark.parametrize(("provider", "base"), [("openai", "/v1"), ("anthropic", "")])
def test_litellm(url, provider, base):
    litellm = pytest.importorskip("litellm", reason=MISSING)
    asked = {"model": f"{provider}/toy", "api_base": url + base, "api_key": "none"}
    asked |= {"messages": ASKED, "tools": [LOOK], "max_tokens": 900}
    plain = litellm.completion(**asked).choices[0]
    chunks = list(litellm.completion(**asked, stream=True))
    whole = litellm.stream_chunk_builder(chunks, messages=ASKED).choices[0]
    assert whole.finish_reason == plain.finish_reason
    # Of a stream by Messages it makes "" of a content that is not there.
    assert (whole.message.content or "") == (plain.message.content or "")
    thought = (getattr(each.message, "reasoning_content", None) for each in (whole, plain))
    assert len(set(thought)) == 1

    def calls(choice):
        found = choice.message.tool_calls or ()
        return [(call.function.name, call.function.arguments) for call in found]

    if provider == "openai":
        assert calls(whole) == calls(plain)
    else:  # of a plain answer it writes the arguments anew
        assert len(calls(whole)) == len(calls(plain))
        for streamed, said in zip(calls(whole), calls(plain), strict=True):
            assert (streamed[0], json.loads(streamed[1])) == (said[0], json.loads(said[1]))


@pytest.mark.agents
@pytest.mark.parametrize("responses", [False, True])
def test_langchain(url, responses):
    chats = pytest.importorskip("langchain_openai", reason=MISSING)
    model = chats.ChatOpenAI(
        model="toy",
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=responses,
    ).bind_tools([LOOK])
    plain = model.invoke("Where?")
    first, *rest = model.stream("Where?")
    whole = sum(rest, first)
    assert whole.text == plain.text

    def calls(message):
        return [(call["name"], call["args"]) for call in message.tool_calls]

    assert calls(whole) == calls(plain)
