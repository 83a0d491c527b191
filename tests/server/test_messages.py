"""Anthropic's protocol: the `anthropic` package against the real server."""

import anthropic
import pytest

from kvweave.config import ServerConfig
from kvweave.engine.types import Usage
from kvweave.errors import OverloadedError
from kvweave.prefix.lease import Reuse
from support.serverkit import TEXT, FakeEngine, RunningServer, prompt_text, toy_tokenizer

ASKED = {"role": "user", "content": "Hi"}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


@pytest.fixture
def claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def create(claude, *messages, **more):
    more = {"model": "toy", "max_tokens": 4, "messages": messages or [ASKED], **more}
    return claude.messages.create(**more)


def test_an_answer(claude, engine):
    engine.usage = Usage(reuse=Reuse(exact=5, moved=3), cache_write_tokens=6)
    message = create(claude, system="Be brief.", extra_body={"cache_salt": "me", "fuzzy": False})
    assert (message.type, message.role, message.model) == ("message", "assistant", "toy")
    assert [block.text for block in message.content] == [TEXT[:4]]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    prompt = len(engine.requests[0].prompt_ids)
    usage = message.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (8, 6)
    assert usage.input_tokens == prompt - 14
    assert usage.output_tokens == 4
    assert usage.moved_tokens == 3
    assert (engine.requests[0].cache_salt, engine.requests[0].fuzzy) == ("me", False)
    shown = "<|start|>system\nBe brief.<|end|><|start|>user\nHi<|end|><|start|>assistant\n"
    assert prompt_text(engine) == shown
    message.model_validate(message.model_dump(exclude_unset=True), strict=True)


def test_a_stream_adds_up_to_the_answer(claude, engine):
    engine.usage = Usage(reuse=Reuse(exact=5))
    plain = create(claude, max_tokens=30)
    kinds = []
    with claude.messages.stream(model="toy", max_tokens=30, messages=[ASKED]) as stream:
        for event in stream:
            kinds.append(event.type)
        whole = stream.get_final_message()
    assert whole.content[0].text == plain.content[0].text == TEXT[:30]
    assert whole.usage.to_dict() == plain.usage.to_dict()
    assert whole.stop_reason == plain.stop_reason
    once = [kind for kind in kinds if kind not in ("content_block_delta", "text")]
    assert once == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_events_are_named_and_no_done_ends_them(client):
    body = {"max_tokens": 2, "messages": [ASKED], "stream": True}
    text = client.post("/v1/messages", json=body).text
    assert text.startswith('event: message_start\ndata: {"type":"message_start"')
    assert text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


def test_why_an_answer_ended(claude, engine):
    engine.answer = lambda request, index: "One. Two."
    message = create(claude, stop_sequences=["Two"], max_tokens=20)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Two")
    assert message.content[0].text == "One. "
    assert create(claude, max_tokens=20).stop_reason == "end_turn"
    engine.answer = lambda request, index: ""
    assert create(claude).content == []


def test_sampling_reaches_the_engine(claude, engine):
    knobs = {"temperature": 0.25, "top_p": 0.5, "top_k": 7}  # of older clients
    create(claude, stop_sequences=["x"], extra_body=knobs)
    sampling = engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 7)
    assert (sampling.stop, sampling.max_tokens) == (("x",), 4)


def test_the_final_assistant_message_is_continued(claude, engine):
    create(claude, ASKED, {"role": "assistant", "content": "The best is ("})
    assert prompt_text(engine).endswith("<|start|>assistant\nThe best is (")
    for content in ("So ", "", []):
        with pytest.raises(anthropic.BadRequestError, match="the answer continues"):
            create(claude, ASKED, {"role": "assistant", "content": content})
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match="no tool_result"):
        create(claude, ASKED, {"role": "assistant", "content": [call]})


def test_neighbours_of_one_role_are_one_turn(claude, engine):
    create(claude, ASKED, {"role": "user", "content": [{"type": "text", "text": "Well?"}]})
    assert prompt_text(engine).startswith("<|start|>user\nHi\nWell?<|end|>")


HISTORY = (
    "{% for t in tools or [] %}[{{ t.function.name }}:{{ t.function.description }}]{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}>"
    "{{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def test_calls_and_their_results_reach_the_template():
    engine = FakeEngine(toy_tokenizer(HISTORY))
    with RunningServer(engine, ServerConfig(port=0)) as server:
        claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        cached = {"cache_control": {"type": "ephemeral"}}
        create(
            claude,
            ASKED,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "a", "name": "look", "input": {"at": 1}},
                    {"type": "tool_use", "id": "b", "name": "look", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "Here."},
                    {
                        "type": "tool_result",
                        "tool_use_id": "b",
                        "is_error": True,
                        "content": [{"type": "text", "text": "Gone."}],
                    },
                    {"type": "text", "text": "So?", **cached},
                ],
            },
            system=[{"type": "text", "text": "One.", **cached}, {"type": "text", "text": "Two."}],
            tools=[{**TOOL, **cached}],
        )
        assert prompt_text(engine) == (
            "[look:Looks.]<|start|>system\nOne.\nTwo.<|end|><|start|>user\nHi<|end|>"
            '<|start|>assistant\nI look.(Hm.)<look>{"at": 1}<look>{}<|end|>'
            "<|start|>tool\nHere.<|end|><|start|>tool\nError:\nGone.<|end|>"
            "<|start|>user\nSo?<|end|><|start|>assistant\n"
        )


def test_counted_tokens_are_those_of_the_prompt(claude, engine):
    create(claude, system="Be brief.", tools=[TOOL])
    counted = claude.messages.count_tokens(
        model="toy", messages=[ASKED], system="Be brief.", tools=[TOOL]
    )
    assert counted.input_tokens == len(engine.requests[-1].prompt_ids)
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("messages.0.content.0", {"messages": [{**ASKED, "content": [{"type": "image"}]}]}),
        ("messages.0.role", {"messages": [{"role": "robot", "content": "x"}]}),
        ("messages.0.content", {"messages": [{"role": "user", "content": 5}]}),
        ("tools.0", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("output_config.effort", {"output_config": {"effort": "low"}}),
        ("temperature", {"extra_body": {"temperature": 3}}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("container", {"extra_body": {"container": "x"}}),
        ("mcp_servers", {"extra_body": {"mcp_servers": [{"url": "x"}]}}),
        ("context_management", {"extra_body": {"context_management": {"edits": [1]}}}),
        ("n", {"extra_body": {"n": 2}}),
    ],
)
def test_what_is_refused_says_where(claude, engine, field, more):
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(claude, *more.pop("messages", ()), **more)
    body = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == field
    assert not engine.requests


def test_fields_that_change_no_answer_pass(claude, engine):
    more = {"cache_control": {"type": "ephemeral"}, "inference_geo": "eu"}
    create(
        claude,
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "disabled"},
        extra_body=more,
    )
    assert len(engine.requests) == 1


def test_the_longest_retention_of_any_block_holds(claude, engine):
    def marked(text, **more):
        return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", **more}}

    create(claude, system=[marked("One.", ttl="1h"), marked("Two.")])
    assert engine.requests[-1].retain_seconds == 3600
    create(claude, system=[marked("Two.")])
    assert engine.requests[-1].retain_seconds == 300
    create(claude, {"role": "user", "content": [marked("Two."), marked("Three.", ttl="1h")]})
    assert engine.requests[-1].retain_seconds == 3600
    create(claude)
    assert engine.requests[-1].retain_seconds == 0


def test_marks_on_parts_of_a_chat_hold_for_the_prompt(engine, client):
    def asked(*parts, **more):
        body = {"model": "toy", "messages": [{"role": "user", "content": parts}], **more}
        reply = client.post("/v1/chat/completions", json=body)
        return reply.status_code, engine.requests[-1].retain_seconds if engine.requests else None

    plain = {"type": "text", "text": "One."}
    hour = {**plain, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    brief = {**plain, "cache_control": {"type": "ephemeral"}}
    assert asked(plain, brief) == (200, 300)
    assert asked(hour, brief) == (200, 3600)
    assert asked(brief, cache_control={"type": "ephemeral", "ttl": "1h"}) == (200, 3600)
    assert asked(plain) == (200, 0)
    assert asked({**plain, "cache_control": {"type": "eternal"}})[0] == 400


def test_failures_have_anthropics_shape(claude, engine, client):
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(claude, model="other")
    assert missing.value.body["error"]["type"] == "not_found_error"
    engine.failure["submit"] = OverloadedError("the queue is full", retry_after=3)
    with pytest.raises(anthropic.RateLimitError) as busy:
        create(claude)
    assert busy.value.response.headers["retry-after"] == "3"
    engine.failure = {"prefill": RuntimeError("broken")}
    with pytest.raises(anthropic.InternalServerError) as broken:
        create(claude)
    assert broken.value.body["error"]["type"] == "api_error"
    reply = client.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert reply.json()["type"] == "error"
    too_large = client.post("/v1/messages", content=b"x" * 200_000)
    assert too_large.json()["error"]["type"] == "request_too_large"


def test_a_failure_in_mid_stream_is_an_event(claude, engine):
    engine.error_after = 3
    with (
        pytest.raises(anthropic.APIStatusError) as broken,
        claude.messages.stream(model="toy", max_tokens=9, messages=[ASKED]) as stream,
    ):
        stream.until_done()
    assert broken.value.body["error"]["message"] == "step broke"


def test_the_key_comes_in_a_header_of_its_own():
    with RunningServer(FakeEngine(), ServerConfig(port=0, api_key="k")) as server:
        right = anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0)
        assert create(right).content
        wrong = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError) as refused:
            create(wrong)
        assert refused.value.body["error"]["type"] == "authentication_error"
