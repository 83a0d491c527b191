"""Agents' packages, real ones, in conversations of ten steps with the packaged model.

Schemas and calls are enforced, so what a small model says has the right form whatever it means.
All answers, streamed and plain, arrive in random pieces.
"""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from kvweave.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from kvweave.engine.async_engine import AsyncEngine
from kvweave.engine.engine import Engine
from kvweave.models import load_model
from kvweave.server.model_card import card_of
from support.agents import LOOK, SCHEMA, STEPS, Place, check, conversation, torn
from support.serverkit import RunningServer

litellm = pytest.importorskip(
    "litellm", reason="make test-agents installs agents' packages and runs these tests"
)
langchain_openai = pytest.importorskip("langchain_openai")
pydantic_ai = pytest.importorskip("pydantic_ai")

pytestmark = [pytest.mark.model, pytest.mark.agents]

MAX_TOKENS = 200
"""More than an enforced answer here needs, unless its white space is as long as it may be."""
NAME = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def url():
    loaded = load_model(ModelConfig(device="cpu"))  # as it is served
    config = EngineConfig(
        cache=CacheConfig(prefix_cache_backend="radix", max_total_tokens=16_384),
        scheduler=SchedulerConfig(random_seed=0),
    )
    engine = AsyncEngine(Engine(config, loaded))
    with (
        RunningServer(engine, ServerConfig(port=0), card_of(loaded)) as server,
        torn(server.url) as url,
    ):
        assert server.card.name == NAME
        yield url


@pytest.fixture
def ai(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_openai_chat(ai):
    asked = {"model": NAME, "max_tokens": MAX_TOKENS}

    def create(messages, **more):
        answer = ai.chat.completions.create(messages=messages, **asked, **more)
        return answer.choices[0].message

    def stream(messages, **more):
        with ai.chat.completions.stream(messages=messages, **asked, **more) as events:
            return events.get_final_completion().choices[0].message

    conversation(create, stream)


def test_openai_responses(ai):
    tool = {"type": "function", **LOOK["function"]}
    asked = {"model": NAME, "max_output_tokens": MAX_TOKENS, "temperature": 0}
    asked["parallel_tool_calls"] = False
    said, before = "Look around.", None
    for step in range(STEPS):
        if step % 3 == 2:
            answer = ai.responses.parse(
                input=said, previous_response_id=before, text_format=Place, **asked
            )
            assert isinstance(answer.output_parsed, Place)
            said, before = "And now?", answer.id
            continue
        choice = {"type": "function", "name": "look"} if step % 3 else "required"
        more = {"input": said, "previous_response_id": before, "tools": [tool]}
        more |= {"tool_choice": choice, **asked}
        with ai.responses.stream(**more) as stream:
            answer = stream.get_final_response()
        (call,) = answer.output
        (plain,) = ai.responses.create(**more).output
        assert (call.name, call.arguments) == (plain.name, plain.arguments)
        check(call.arguments)
        said = [{"type": "function_call_output", "call_id": call.call_id, "output": "A tree."}]
        before = answer.id


def test_anthropic(url):
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tool = {"name": "look", "description": "Look at a place.", "input_schema": SCHEMA}
    messages = [{"role": "user", "content": "Look around."}]
    asked = {"model": NAME, "max_tokens": MAX_TOKENS, "messages": messages}
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    for step in range(STEPS):
        if step % 3 == 2:
            more = {"output_config": form}
        else:
            choice = {"type": "tool", "name": "look"} if step % 3 else {"type": "any"}
            more = {"tools": [tool], "tool_choice": choice | {"disable_parallel_tool_use": True}}
        more["extra_body"] = {"temperature": 0}
        plain = claude.messages.create(**asked, **more)
        with claude.messages.stream(**asked, **more) as stream:
            whole = stream.get_final_message()
        usage = plain.usage
        counted = {name: more[name] for name in ("tools", "tool_choice") if name in more}
        prompt = claude.messages.count_tokens(model=NAME, messages=messages, **counted)
        read, created = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        assert usage.input_tokens + read + created == prompt.input_tokens
        (block,), (again,) = plain.content, whole.content
        messages.append({"role": "assistant", "content": [block.to_dict()]})
        if step % 3 == 2:
            assert block.text == again.text
            check(block.text)
            messages.append({"role": "user", "content": "And now?"})
            continue
        assert (block.name, block.input) == (again.name, again.input)
        check(block.input)
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "A tree."}
        messages.append({"role": "user", "content": [result]})


@pytest.mark.parametrize(("provider", "base"), [("openai", "/v1"), ("anthropic", "")])
def test_litellm(url, provider, base):
    asked = {"model": f"{provider}/{NAME}", "api_base": url + base, "api_key": "none"}
    asked |= {"max_tokens": MAX_TOKENS, "temperature": 0}

    def create(messages, **more):
        if provider == "anthropic":
            del more["seed"]  # which Anthropic has not
        answer = litellm.completion(messages=messages, **asked, **more).choices[0].message
        for call in answer.tool_calls or ():
            # Of a plain answer by Messages it writes the arguments anew.
            call.function.arguments = json.dumps(json.loads(call.function.arguments))
        return answer

    def stream(messages, **more):
        if provider == "anthropic":
            del more["seed"]
        chunks = list(litellm.completion(messages=messages, **asked, **more, stream=True))
        answer = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
        for call in answer.tool_calls or ():
            call.function.arguments = json.dumps(json.loads(call.function.arguments))
        return answer

    conversation(create, stream)


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def langchain(url, request):
    return langchain_openai.ChatOpenAI(
        model=NAME,
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        max_tokens=MAX_TOKENS,
        temperature=0,
        use_responses_api=request.param,
    )


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_structured_output(langchain, method):
    form = langchain.with_structured_output(Place, method=method)
    said = []
    for step in range(STEPS):
        said += [("user", f"Where is place {step}?")]
        place = form.invoke(said)
        assert isinstance(place, Place)
        said += [("assistant", place.model_dump_json())]


def test_langchain_json_mode(langchain):
    """JSON of any kind: what the model means by it is not enforced."""
    form = langchain.with_structured_output(Place, method="json_mode", include_raw=True)
    ended = 0
    for step in range(STEPS):
        try:
            raw = form.invoke(f"Where is place {step}? Answer in JSON.")["raw"]
        except openai.LengthFinishReasonError:  # which it raises of chats
            continue
        facts = raw.response_metadata
        if facts.get("finish_reason") == "stop" or facts.get("status") == "completed":
            assert isinstance(json.loads(raw.text), dict)
            ended += 1
    assert ended


def test_langchain_tool_loop(langchain):
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    seen = []

    @tool("look", args_schema=Place)
    def look(name, distance):
        """Look at a place."""
        seen.append((name, distance))
        return "A tree."

    # Unless it is strict, langchain drops additionalProperties.
    calling = langchain.bind_tools(
        [look], tool_choice="any", parallel_tool_calls=False, strict=True
    )
    said = [HumanMessage("Look around.")]
    for _ in range(STEPS):
        answer = calling.invoke(said)
        first, *rest = calling.stream(said)
        whole = sum(rest, first)
        (call,), (again,) = answer.tool_calls, whole.tool_calls
        assert (call["name"], call["args"]) == (again["name"], again["args"])
        said += [answer, look.invoke(call)]
    assert len(seen) == STEPS
    assert said[-1].content == "A tree."


@pytest.mark.parametrize("protocol", ["chat", "responses"])
@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
def test_pydantic_ai(url, protocol, output):
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIChatModel if protocol == "chat" else OpenAIResponsesModel
    model = kind(NAME, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    form = getattr(pydantic_ai, output)(Place)
    settings = {"max_tokens": MAX_TOKENS, "temperature": 0, "parallel_tool_calls": False}
    agent = pydantic_ai.Agent(model, output_type=form, model_settings=settings)
    history = None
    for step in range(STEPS):
        result = agent.run_sync(f"Where is place {step}?", message_history=history)
        assert isinstance(result.output, Place)
        history = result.all_messages()
    streamed = agent.run_stream_sync("Where?", message_history=history)
    assert isinstance(streamed.get_output(), Place)


def test_pydantic_ai_tool_loop(url):
    """The framework asks ten times: each answer calls the tool, and only then may it end."""
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.usage import UsageLimits

    model = OpenAIChatModel(NAME, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings = {"max_tokens": MAX_TOKENS, "temperature": 0, "parallel_tool_calls": False}
    agent = pydantic_ai.Agent(model, output_type=Place, model_settings=settings)
    seen = []

    @agent.tool_plain(prepare=lambda context, tool: tool if len(seen) < STEPS - 1 else None)
    def look(distance: int) -> str:
        """Look that far."""
        seen.append(distance)
        return "A tree."

    try:
        result = agent.run_sync("Look around.", usage_limits=UsageLimits(request_limit=STEPS))
    except pydantic_ai.UsageLimitExceeded:
        pytest.fail(f"the loop did not end after {len(seen)} calls")
    assert isinstance(result.output, Place)
