"""OpenAI's Responses: the `openai` package against the real server."""

import openai
import pytest

from kvweave.config import ServerConfig
from kvweave.engine.types import Usage
from kvweave.prefix.lease import Reuse
from kvweave.server.responses import ResponseStore
from support.serverkit import TEXT, FakeEngine, RunningServer, prompt_text, toy_tokenizer

FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@pytest.fixture
def ai(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def create(ai, input="Hi", **more):
    return ai.responses.create(**{"model": "toy", "input": input, "max_output_tokens": 4, **more})


def test_an_answer(ai, engine):
    engine.usage = Usage(reuse=Reuse(exact=5, moved=3), cache_write_tokens=6)
    engine.answer = lambda request, index: "Yes."
    answer = create(
        ai,
        instructions="Be brief.",
        metadata={"k": "v"},
        max_output_tokens=20,
        extra_body={"cache_salt": "me"},
    )
    assert answer.output_text == "Yes."
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"k": "v"})
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(engine.requests[0].prompt_ids), 4)
    assert usage.total_tokens == usage.input_tokens + 4
    details = usage.input_tokens_details
    assert (details.cached_tokens, details.cache_write_tokens, details.moved_tokens) == (5, 6, 3)
    assert engine.requests[0].cache_salt == "me"
    shown = "<|start|>system\nBe brief.<|end|><|start|>user\nHi<|end|><|start|>assistant\n"
    assert prompt_text(engine) == shown
    answer.model_validate(answer.model_dump(exclude_unset=True), strict=True)


def test_a_stream_adds_up_to_the_answer(ai, engine):
    engine.answer = lambda request, index: TEXT
    kinds, numbers = [], []
    with ai.responses.stream(model="toy", input="Hi") as stream:
        for event in stream:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
        whole = stream.get_final_response()
    assert whole.output_text == TEXT
    assert whole.usage.output_tokens == len(TEXT)
    assert numbers == list(range(len(numbers)))
    assert list(dict.fromkeys(kinds)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert ai.responses.retrieve(whole.id).output_text == TEXT


def test_an_answer_that_is_cut_off_is_incomplete(ai):
    answer = create(ai)
    assert answer.status == answer.output[0].status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == TEXT[:4]
    last = list(create(ai, stream=True))[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == TEXT[:4]


def test_log_probabilities(ai):
    answer = create(ai, include=["message.output_text.logprobs"], top_logprobs=2)
    scores = answer.output[0].content[0].logprobs
    assert "".join(score.token for score in scores) == TEXT[:4]
    assert len(scores[0].top_logprobs) == 2
    assert create(ai).output[0].content[0].logprobs == []


def test_a_response_is_continued_by_its_id(ai, engine):
    engine.answer = lambda request, index: "Red."
    first = create(ai, "A colour?", instructions="Be brief.", max_output_tokens=9)
    second = create(ai, "Another?", previous_response_id=first.id, max_output_tokens=9)
    create(ai, "And?", previous_response_id=second.id)
    assert second.previous_response_id == first.id
    turns = [
        "user\nA colour?",
        "assistant\nRed.",
        "user\nAnother?",
        "assistant\nRed.",
        "user\nAnd?",
    ]
    shown = "".join(f"<|start|>{turn}<|end|>" for turn in turns)
    assert prompt_text(engine) == f"{shown}<|start|>assistant\n", "instructions are not carried on"
    items = ai.responses.input_items.list(second.id).data
    assert [item.content for item in items] == ["Another?"]


def test_what_is_not_stored_is_not_found(ai):
    kept = create(ai, extra_body={"cache_salt": "a"})
    for name, more in (
        ("resp_none", {}),
        (create(ai, store=False).id, {}),
        (kept.id, {}),
        (kept.id, {"cache_salt": "b"}),
    ):
        with pytest.raises(openai.NotFoundError):
            ai.responses.retrieve(name, extra_query=more)
        with pytest.raises(openai.NotFoundError) as refused:
            create(ai, previous_response_id=name, extra_body=more)
        assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            ai.responses.delete(name, extra_query=more)
    salted = {"cache_salt": "a"}
    assert ai.responses.retrieve(kept.id, extra_query=salted).id == kept.id
    follower = create(ai, previous_response_id=kept.id, extra_body=salted)
    ai.responses.delete(kept.id, extra_query=salted)
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(kept.id, extra_query=salted)
    create(ai, previous_response_id=follower.id, extra_body=salted)


def test_the_store_forgets_the_least_recently_used(monkeypatch):
    store = ResponseStore(2)
    for name in "abc":
        store.add({"id": name}, [], [], None)
        if name == "b":
            store.find("a", None)
    assert [name for name in "abc" if name in store._by_id] == ["a", "c"]
    monkeypatch.setattr("kvweave.server.responses.MAX_BYTES", 300)
    store.add({"id": "d"}, [], [{"content": "x" * 200}], None)
    assert [name for name in "acd" if name in store._by_id] == ["c", "d"]
    store.add({"id": "e"}, [], [{"content": "x" * 400}], None)
    assert len(store) == store._bytes == 0
    none = ResponseStore(0)
    none.add({"id": "a"}, [], [], None)
    assert len(none) == 0


HISTORY = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}>"
    "{{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def test_items_reach_the_template():
    engine = FakeEngine(toy_tokenizer(HISTORY))
    with RunningServer(engine, ServerConfig(port=0)) as server:
        ai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        said = [{"type": "input_text", "text": "Where?"}]
        create(
            ai,
            [
                {"role": "developer", "content": "Be brief."},
                {"type": "message", "role": "user", "content": said},
                {
                    "type": "reasoning",
                    "id": "r",
                    "summary": [{"text": "Hm.", "type": "summary_text"}],
                },
                {"role": "assistant", "content": "I look."},
                {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"at":1}'},
                {"type": "function_call", "call_id": "b", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "Here."},
                {"type": "function_call_output", "call_id": "b", "output": said},
            ],
            tools=[FUNCTION],
        )
        assert prompt_text(engine) == (
            "[look]<|start|>system\nBe brief.<|end|><|start|>user\nWhere?<|end|>"
            '<|start|>assistant\nI look.(Hm.)<look>{"at": 1}<look>{}<|end|>'
            "<|start|>tool\nHere.<|end|><|start|>tool\nWhere?<|end|><|start|>assistant\n"
        )


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("input.0", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("input.0.content.0", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("input.0.content", {"input": [{"role": "user", "content": 5}]}),
        ("input.0", {"input": [{"type": "reasoning", "summary": "Hm."}]}),
        ("text.format", {"text": {"format": "json"}}),
        ("tools.0", {"tools": [{"type": "web_search"}]}),
        ("max_output_tokens", {"max_output_tokens": -1}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("reasoning.effort", {"reasoning": {"effort": "high"}}),
        ("truncation", {"truncation": "auto"}),
        ("background", {"background": True}),
        ("conversation", {"conversation": "conv_1"}),
        ("prompt", {"prompt": {"id": "p"}}),
        ("stop", {"extra_body": {"stop": "x"}}),
    ],
)
def test_what_is_refused_says_where(ai, engine, field, more):
    with pytest.raises(openai.BadRequestError) as refused:
        create(ai, **more)
    assert refused.value.param == field
    assert not engine.requests


def test_a_failure_in_mid_stream_is_an_event(ai, engine):
    engine.error_after = 3
    last = list(create(ai, max_output_tokens=9, stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error.message == "step broke"
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(last.response.id)
