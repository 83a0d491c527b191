"""Calls, reasoning and structured output over Responses and Messages, with their own clients."""

import json

import anthropic
import openai
import pytest

from kvweave.config import ServerConfig
from support.serverkit import FakeEngine, RunningServer, toy_tokenizer

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "look", "parameters": SCHEMA}
TOOL = {"name": "look", "input_schema": SCHEMA}
CALLS = (
    '<think>Hm.</think>Well.\n<tool_call>\n{"name": "look", "arguments": {"at": "naïve }"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
)
CUT = CALLS[:80]
ASKED = [{"role": "user", "content": "Where?"}]


@pytest.fixture(scope="module")
def served():
    template = (
        "{# <think></think> #}{{ tools | length if tools else 0 }} tools\n"
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    )
    with RunningServer(FakeEngine(toy_tokenizer(template)), ServerConfig(port=0)) as server:
        yield server


@pytest.fixture
def engine(served):
    served.engine.reset()
    served.engine.answer = lambda request, index: CALLS
    return served.engine


@pytest.fixture
def ai(served, engine):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def claude(served, engine):
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def respond(ai, **more):
    return ai.responses.create(**{"model": "toy", "input": "Where?", "tools": [FUNCTION], **more})


def message(claude, **more):
    more = {"tools": [TOOL], "max_tokens": 900, **more}
    return claude.messages.create(model="toy", messages=ASKED, **more)


def test_a_response_has_items_of_reasoning_text_and_calls(ai):
    answer = respond(ai)
    reasoning, said, *calls = answer.output
    assert reasoning.content[0].text == "Hm."
    assert said.content[0].text == "Well."
    assert [(call.name, call.arguments) for call in calls] == [
        ("look", '{"at": "naïve }"}'),
        ("look", "{}"),
    ]
    assert len({call.call_id for call in calls}) == 2
    assert answer.status == "completed"
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    answer.model_validate(answer.model_dump(exclude_unset=True), strict=True)


def test_a_streamed_response_adds_up(ai):
    plain = respond(ai)
    kinds = []
    with ai.responses.stream(model="toy", input="Where?", tools=[FUNCTION]) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.function_call_arguments.delta":
                assert event.snapshot.endswith(event.delta)
        whole = stream.get_final_response()

    def shown(answer):
        return [
            item.to_dict()
            | {"id": "", "call_id": "", "content": [c.text for c in getattr(item, "content", ())]}
            for item in answer.output
        ]

    def plainly(items):
        return [{k: v for k, v in item.items() if not k.startswith("parsed")} for item in items]

    assert plainly(shown(whole)) == plainly(shown(plain))
    items = [kind for kind in kinds if "output_item" in kind]
    assert items == ["response.output_item.added", "response.output_item.done"] * 4
    assert kinds.count("response.function_call_arguments.done") == 2
    assert "response.reasoning_text.delta" in kinds


def test_a_response_with_calls_is_continued_by_its_id(ai, engine):
    first = respond(ai)
    call = first.output[2].call_id
    done = [{"type": "function_call_output", "call_id": call, "output": "Here."}]
    engine.answer = lambda request, index: "There."
    second = respond(ai, input=done, previous_response_id=first.id)
    assert second.output_text == "There."
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
    assert prompt.index("Well.") < prompt.index("Here.")


def test_a_message_has_blocks_of_thought_text_and_calls(claude):
    answer = message(claude)
    kinds = [block.type for block in answer.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.content[0].thinking == "Hm."
    assert answer.content[1].text == "Well."
    assert [block.input for block in answer.content[2:]] == [{"at": "naïve }"}, {}]
    assert all(block.id.startswith("toolu_") for block in answer.content[2:])
    assert answer.stop_reason == "tool_use"
    answer.model_validate(answer.model_dump(exclude_unset=True), strict=True)


def test_a_streamed_message_adds_up(claude):
    plain = message(claude)
    with claude.messages.stream(
        model="toy", messages=ASKED, tools=[TOOL], max_tokens=900
    ) as stream:
        whole = stream.get_final_message()

    def shown(answer):
        blocks = [block.to_dict() | {"id": ""} for block in answer.content]
        return [{k: v for k, v in block.items() if k != "parsed_output"} for block in blocks]

    assert shown(whole) == shown(plain)
    assert whole.stop_reason == "tool_use"


def test_arguments_that_are_cut_off_are_shown_as_such(claude, ai):
    block = message(claude, max_tokens=len(CUT.encode())).content[-1]
    assert list(block.input) == ["INVALID_JSON"]
    item = respond(ai, max_output_tokens=len(CUT.encode())).output[-1]
    assert (item.status, item.arguments) == ("incomplete", block.input["INVALID_JSON"])


def test_choices_become_grammars(ai, claude, engine):
    def grammar():
        found = engine.requests[-1].sampling.grammar
        return found and found.text

    respond(ai, tool_choice="auto")
    assert grammar() is None
    message(claude, tool_choice={"type": "auto"})
    assert grammar() is None
    respond(ai, tool_choice="required")
    several = grammar()
    message(claude, tool_choice={"type": "any"})
    assert grammar() == several
    respond(ai, tool_choice="required", parallel_tool_calls=False)
    one = grammar()
    message(claude, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert grammar() == one != several
    respond(ai, tool_choice={"type": "function", "name": "look"})
    named = grammar()
    message(claude, tool_choice={"type": "tool", "name": "look"})
    assert grammar() == named is not None
    message(claude, tool_choice={"type": "none"})
    assert grammar() is None


def test_structured_output(ai, claude, engine):
    engine.answer = lambda request, index: '{"at": "sea"}'
    format = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    answer = respond(ai, tools=[], text={"format": format})
    assert json.loads(answer.output_text) == {"at": "sea"}
    asked = engine.requests[-1].sampling.grammar
    assert '"at"' in asked.text.replace("\\", "")
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message(claude, tools=[], output_config=config)
    assert engine.requests[-1].sampling.grammar == asked
    respond(ai, tools=[], text={"format": {"type": "json_object"}})
    assert engine.requests[-1].sampling.grammar not in (None, asked)


def test_a_grammar_in_sampling_params(served, engine):
    with served.client() as client:
        params = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 1}
        body = {"text": "x", "sampling_params": params}
        assert client.post("/generate", json=body).status_code == 200
        assert engine.requests[-1].sampling.grammar.kind == "json_schema"
        body["sampling_params"] = {"json_schema": "{"}
        error = client.post("/generate", json=body).json()["error"]
        assert error["param"] == "sampling_params.json_schema"


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "f"}, {"type": "some"}])
def test_a_choice_that_makes_no_sense_is_refused(claude, choice):
    with pytest.raises(anthropic.BadRequestError) as refused:
        message(claude, tool_choice=choice)
    assert refused.value.body["error"]["param"] == "tool_choice"
