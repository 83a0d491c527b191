"""Tools, reasoning and grammars over HTTP, with a scripted engine and the openai package."""

import json

import openai
import pytest

from kvweave.config import ServerConfig
from kvweave.server.tools import MAX_CALLS
from support.serverkit import FakeEngine, RunningServer, prompt_text, say, toy_tokenizer

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
ADD = {"type": "function", "function": {"name": "add"}}
CALLS = (
    'Well.\n<tool_call>\n{"name": "look", "arguments": {"at": "naïve }"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
)
ASKED = [{"role": "user", "content": "Where?"}]


@pytest.fixture
def ai(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(ai, **more):
    more.setdefault("tools", [LOOK, ADD])
    return ai.chat.completions.create(model="toy", messages=ASKED, **more)


def joined(stream):
    text, reasoning, calls, reason = "", "", {}, None
    for chunk in stream:
        chunk.model_validate(chunk.model_dump(exclude_unset=True), strict=True)
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            known = calls.setdefault(call.index, ["", ""])
            assert bool(call.id) == bool(call.function.name) == (known[0] == "")
            known[0] += call.function.name or ""
            known[1] += call.function.arguments
        reason = choice.finish_reason or reason
    return text, reasoning, list(calls.values()), reason


@pytest.mark.parametrize("text", [CALLS, CALLS[:62], "Plain.", "<tool_call> is a mark"])
def test_calls_come_whole_and_by_fragments(ai, engine, text):
    engine.answer = lambda request, index: text
    answer = chat(ai).choices[0]
    calls = [[c.function.name, c.function.arguments] for c in answer.message.tool_calls or ()]
    plain = (answer.message.content or "", "", calls, answer.finish_reason)
    assert joined(chat(ai, stream=True)) == plain
    if text == CALLS:
        assert plain[0] == "Well."
        assert calls == [["look", '{"at": "naïve }"}'], ["add", "{}"]]
        assert answer.finish_reason == "tool_calls"
        assert len({call.id for call in answer.message.tool_calls}) == 2
    elif text == CALLS[:62]:
        assert calls == [["look", '{"at": "naïve ']]
    else:
        assert plain == (text, "", [], "stop")


def test_a_message_of_calls_alone_has_no_content(client, engine):
    engine.answer = lambda request, index: CALLS.removeprefix("Well.\n")
    message = say(client, tools=[LOOK, ADD], max_tokens=None).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2


def test_without_tools_calls_are_text(ai, engine):
    engine.answer = lambda request, index: CALLS
    for more in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        message = chat(ai, **more).choices[0].message
        assert (message.content, message.tool_calls) == (CALLS, None)


def test_a_choice_of_tools_becomes_a_grammar(ai, engine):
    def grammar(**more):
        chat(ai, max_tokens=1, **more)
        return engine.requests[-1].sampling.grammar

    assert grammar() is None
    named = grammar(tool_choice={"type": "function", "function": {"name": "add"}})
    assert '"add' in named.text.replace("\\", "")
    assert "look" not in named.text
    assert f"{{0,{MAX_CALLS - 1}}}" in grammar(tool_choice="required").text
    assert (
        f"{{0,{MAX_CALLS - 1}}}"
        not in grammar(tool_choice="required", parallel_tool_calls=False).text
    )
    strict = {**LOOK, "function": {**LOOK["function"], "strict": True}}
    assert "TEXT" in grammar(tools=[strict]).text
    either = grammar(response_format={"type": "json_object"})
    assert "plain: %json" in either.text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tool_choice": "any"}, "names a function"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "not among the tools"),
        ({"tools": [{"type": "web_search"}]}, "a tool is"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "letters"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "has a mode"),
    ],
)
def test_tools_and_choices_that_make_no_sense_are_refused(ai, engine, more, words):
    with pytest.raises(openai.BadRequestError, match=words):
        chat(ai, **more)
    assert not engine.requests


def test_a_template_that_knows_no_tools_gets_them_as_text():
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    for config in (ServerConfig(port=0), ServerConfig(port=0, describe_tools=False)):
        engine = FakeEngine(toy_tokenizer(template))
        with RunningServer(engine, config) as server, server.client() as client:
            reply = say(client, tools=[LOOK])
            if not config.describe_tools:
                assert reply.json()["error"]["param"] == "tools"
                continue
            assert json.dumps(LOOK["function"]) in prompt_text(engine)
            system = {"role": "system", "content": "Be brief."}
            say(client, messages=[system, *ASKED], tools=[LOOK])
            assert prompt_text(engine).startswith("<|start|>system\nBe brief.\n\nYou can call")


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_apart_from_the_answer(opened):
    template = (
        "{# <think></think> #}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
        + ("<think>" if opened else "")
    )
    engine = FakeEngine(toy_tokenizer(template))
    engine.answer = lambda request, index: ("" if opened else "<think>") + f"Hm.</think>\n\n{CALLS}"
    with RunningServer(engine, ServerConfig(port=0)) as server:
        ai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        message = chat(ai).choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm.", "Well.")
        text, reasoning, calls, reason = joined(chat(ai, stream=True))
        assert (text, reasoning, len(calls), reason) == ("Well.", "Hm.", 2, "tool_calls")
        kept = chat(ai, extra_body={"separate_reasoning": False}).choices[0].message
        assert "Hm.</think>" in kept.content
        hidden = chat(ai, extra_body={"include_reasoning": False}).choices[0].message
        assert not hasattr(hidden, "reasoning_content")
        chat(ai, max_tokens=1, response_format={"type": "json_object"})
        assert "think" in engine.requests[-1].sampling.grammar.text


def test_every_field_reaches_the_engine_as_a_grammar(client, engine):
    schema = {"type": "object"}
    for more, kind in (
        ({"response_format": {"type": "json_object"}}, "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
            "json_schema",
        ),
        ({"json_schema": json.dumps(schema)}, "json_schema"),
        ({"guided_json": schema}, "json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"guided_regex": "a+"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "lark"),
        ({"grammar": 'start: "a"'}, "lark"),
        ({"guided_choice": ["a", "b"]}, "lark"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "lark"),
        ({"structured_outputs": {"json_object": True}}, "json_schema"),
        (
            {
                "structural_tag": {
                    "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
                    "triggers": ["<f"],
                }
            },
            "lark",
        ),
    ):
        assert say(client, **more).status_code == 200
        assert engine.requests[-1].sampling.grammar.kind == kind
        reply = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **more})
        assert reply.status_code == 200
        assert engine.requests[-1].sampling.grammar.kind == kind
    for more in (
        {"ebnf": "root ::= ("},
        {"guided_choice": []},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"json_schema": "{"},
        {"structural_tag": {"structures": [], "triggers": []}},
    ):
        reply = say(client, **more)
        assert reply.json()["error"]["param"] in more


def test_an_enforced_call_that_is_cut_off_is_no_text(ai, engine):
    engine.answer = lambda request, index: CALLS.removeprefix("Well.\n")[:101]
    for more in ({}, {"tool_choice": "required"}):
        message = chat(ai, max_tokens=99, **more).choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "look"
        assert message.content == (None if more else '<tool_call>\n{"name": "ad')
        streamed = joined(chat(ai, max_tokens=99, stream=True, **more))
        assert streamed[0] == (message.content or "")


@pytest.mark.parametrize("text", [CALLS, CALLS.removeprefix("Well.\n"), ""])
def test_a_streams_content_is_null_where_the_answers_is(ai, engine, text):
    engine.answer = lambda request, index: text
    plain = chat(ai).choices[0].message.content
    with ai.chat.completions.stream(model="toy", messages=ASKED, tools=[LOOK, ADD]) as stream:
        assert stream.get_final_completion().choices[0].message.content == plain
