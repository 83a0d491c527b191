"""Conversations with calls, nulls and parts, through chat templates of several kinds."""

import openai
import pytest

from kvweave.config import ServerConfig
from kvweave.errors import UnsupportedModelError
from kvweave.server.prompts import PromptReader
from support.serverkit import FakeEngine, RunningServer, toy_card, toy_tokenizer

TURN = "{% for m in messages %}<|start|>{{ m.role }}\n"
END = "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
TEMPLATES = {
    # Walks through the arguments.
    "items": TURN + "{{ m.content }}{% for call in m.tool_calls or [] %}<{{ call.function.name }}>"
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}"
    "{% endfor %}" + END,
    # Writes them as JSON.
    "tojson": TURN + "{{ m.content }}{% for call in m.tool_calls or [] %}<{{ call.function.name }}>"
    "{{ call.function.arguments | tojson }}{% endfor %}" + END,
    # Tells messages with calls by the presence of the field.
    "presence": TURN + "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call only') }}{% endif %}"
    "<{{ m.tool_calls[0].function.name }}>{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}{{ m.content + '' }}{% endif %}" + END,
    # Reads content as a list of parts.
    "parts": TURN
    + "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% for call in m.tool_calls or [] %}<{{ call.function.name }}>"
    "{{ call.function.arguments | tojson }}{% endfor %}" + END,
    # Parts of the user only; everything else is text.
    "mixed": TURN
    + "{% if m.role == 'user' %}{{ m.content[0].text }}{% else %}{{ m.content + '' }}{% endif %}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}>"
    "{{ call.function.arguments | tojson }}{% endfor %}" + END,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module", params=TEMPLATES)
def template(request):
    return request.param


@pytest.fixture(scope="module")
def served(template):
    engine = FakeEngine(toy_tokenizer("{% if tools %}{% endif %}" + TEMPLATES[template]))
    with RunningServer(engine, ServerConfig(port=0)) as server:
        yield server


@pytest.fixture
def render(served):
    """Sends a conversation by OpenAI's client; returns the prompt that the engine got."""
    ai = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    def render(*messages):
        ai.chat.completions.create(model="toy", messages=messages, tools=[TOOL], max_tokens=1)
        return served.engine.tokenizer.decode(served.engine.requests[-1].prompt_ids)

    return render


def call(arguments, **more):
    function = {"name": "look", "arguments": arguments}
    answer = {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function"} | {"function": function}],
    }
    return {**answer, **more}


ASKED = {"role": "user", "content": "Where?"}
ANSWERED = {"role": "tool", "tool_call_id": "1", "content": "Here."}


def test_arguments_are_objects_for_the_template(render, template):
    prompt = render(ASKED, call('{"at": "naïve", "n": 2}', content=None), ANSWERED)
    shown = "at=naïve;n=2;" if template == "items" else '{"at": "naïve", "n": 2}'
    assert f"assistant\n<look>{shown}<|end|>" in prompt
    assert "user\nWhere?<|end|>" in prompt
    assert "tool\nHere.<|end|>" in prompt


@pytest.mark.parametrize("arguments", ["", " ", "{}", "null", None])
def test_no_arguments_are_an_empty_object(render, template, arguments):
    shown = "" if template == "items" else "{}"
    assert f"<look>{shown}<|end|>" in render(ASKED, call(arguments))


def test_an_answer_comes_back_as_the_client_dumps_it(render):
    """With every field that it has, most of them null."""
    said = openai.types.chat.ChatCompletionMessage(role="assistant", content="There.")
    prompt = render(ASKED, {**said.to_dict(exclude_unset=False, mode="json")}, ASKED)
    assert "assistant\nThere.<|end|>" in prompt
    assert "None" not in prompt


def test_parts_reach_every_template(render):
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    prompt = render(ASKED, {"role": "assistant", "content": parts}, ASKED)
    assert "One." in prompt
    assert "Two." in prompt


def test_arguments_that_are_no_object_are_refused_by_their_place(served):
    ai = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    for wrong in ('{"at": ', "[1]", "5", "[" * 100_000, 5):
        with pytest.raises(openai.BadRequestError, match="no JSON object") as refused:
            ai.chat.completions.create(model="toy", messages=[ASKED, call(wrong)])
        assert refused.value.param == "messages.1.tool_calls"


def test_calls_in_another_shape_are_refused(served):
    with served.client() as client:
        for message, words in (
            ({"role": "assistant", "tool_calls": [{"name": "look"}]}, "function"),
            ({"role": "assistant", "tool_calls": "look"}, "list of calls"),
            ({"role": "assistant", "function_call": {"name": "look"}}, "write tool_calls"),
        ):
            body = {"messages": [ASKED, message]}
            reply = client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 400
            assert words in reply.json()["error"]["message"]


def test_developers_are_heard_by_templates_that_know_only_a_system(render):
    prompt = render({"role": "developer", "content": "Be brief."}, ASKED)
    assert "<|start|>system\nBe brief." in prompt


def test_a_template_that_drops_what_users_say_is_refused_at_start():
    tokenizer = toy_tokenizer("{% for m in messages %}{{ m.text }}{% endfor %}")
    with pytest.raises(UnsupportedModelError, match="writes nothing of what a user says"):
        PromptReader(tokenizer, toy_card(tokenizer))


@pytest.mark.parametrize(
    ("template", "variables", "effort", "reaches"),
    [
        ("{{ reasoning_effort }}", None, "high", "high"),
        ("{{ enable_thinking }}", None, "none", "False"),
        ("{{ thinking }}", None, "low", "True"),
        ("{{ enable_thinking }}", {"enable_thinking": False}, "high", "False"),
        ("", None, "none", ""),
    ],
)
def test_how_much_to_reason_is_told_to_the_template(template, variables, effort, reaches):
    engine = FakeEngine(toy_tokenizer("{{ messages[0].content }}=" + template))
    with RunningServer(engine, ServerConfig(port=0)) as server, server.client() as client:
        body = {"messages": [ASKED], "reasoning_effort": effort, "max_tokens": 1}
        reply = client.post(
            "/v1/chat/completions", json={**body, "chat_template_kwargs": variables}
        )
        assert reply.status_code == 200, reply.text
        prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
        assert prompt == f"Where?={reaches}"


def test_documents_reach_a_template_that_reads_them():
    engine = FakeEngine(
        toy_tokenizer("{% for d in documents %}{{ d.text }}{% endfor %}{{ messages[0].content }}")
    )
    with RunningServer(engine, ServerConfig(port=0)) as server, server.client() as client:
        body = {"messages": [ASKED], "documents": [{"title": "t", "text": "Facts. "}]}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert engine.tokenizer.decode(engine.requests[-1].prompt_ids) == "Facts. Where?"
