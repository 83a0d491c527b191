"""POST /v1/chat/completions: templates, content parts, tools, log probabilities, streams."""

import pytest

from support.serverkit import CHAT, TEXT, events, prompt_text, say


def test_the_shape_of_an_answer(client):
    answer = say(client, rid="mine", model="toy").json()
    assert answer.pop("created") > 0
    assert answer == {
        "id": "chatcmpl-mine",
        "object": "chat.completion",
        "model": "toy",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT[:4], "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "matched_stop": None,
            }
        ],
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 4,
            "total_tokens": 24,
            "prompt_tokens_details": {
                "cached_tokens": 0,
                "moved_tokens": 0,
                "paraphrase_tokens": 0,
                "refreshed_tokens": 0,
                "session_tokens": 0,
                "shared_tokens": 0,
                "cache_write_tokens": 0,
            },
        },
    }


def test_the_template_writes_the_prompt(client, engine):
    say(client, "Hi")
    assert prompt_text(engine) == "<|start|>user\nHi<|end|><|start|>assistant\n"


def test_text_parts_are_joined_and_other_parts_refused(client, engine):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    say(client, messages=[{"role": "user", "content": parts}])
    assert "one\ntwo" in prompt_text(engine)
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    reply = say(client, messages=[{"role": "user", "content": image}])
    assert reply.status_code == 400
    assert "not 'image_url'" in reply.json()["error"]["message"]


def test_the_newer_name_of_the_limit_wins(client):
    usage = say(client, max_completion_tokens=2).json()["usage"]
    assert usage["completion_tokens"] == 2


def test_without_a_limit_answers_run_to_the_end(client, engine):
    engine.answer = lambda request, index: "done"
    answer = say(client, max_tokens=None).json()
    assert engine.requests[-1].sampling.max_tokens is None
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_tools_reach_a_template_that_knows_them(client, engine):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    say(client, tools=[tool])
    assert prompt_text(engine).startswith("1 tools\n")
    say(client, tools=[tool], tool_choice="none")
    assert "tools" not in prompt_text(engine)
    reply = say(client, tool_choice="required")
    assert reply.json()["error"]["param"] == "tool_choice"


def test_a_call_in_the_history_reaches_the_template(client, engine):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    assert say(client, messages=history).status_code == 200
    # This template knows no calls: they and their results are text.
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    result = "<tool_response>\n42\n</tool_response>"
    assert f"assistant\n{call}<|end|><|start|>user\n{result}<|end|>" in prompt_text(engine)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "no robots"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role is missing"),
        ({"messages": "hello"}, "messages"),
        ({"top_logprobs": 2}, "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "between 0 and 20"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"regex": "a", "guided_choice": ["b"]}, "send one"),
        ({"response_format": {"type": "json_schema"}}, "holds no JSON schema"),
        ({"functions": [{"name": "f"}]}, "tools"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template_kwargs": {"tokenize": True}}, "may not set tokenize"),
        ({"stream_options": {"include_usage": True}}, "stream: true"),
    ],
)
def test_unserved_requests_are_refused_in_words(client, engine, body, words):
    reply = say(client, **body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]
    assert not engine.requests


def test_harmless_extras_pass(client):
    extras = {"response_format": {"type": "text"}, "modalities": ["text"], "store": True}
    assert say(client, parallel_tool_calls=False, metadata={"a": "b"}, **extras).status_code == 200


def test_logprobs_carry_bytes_and_alternatives(client, engine):
    engine.answer = lambda request, index: "a€"
    [choice] = say(client, logprobs=True, top_logprobs=2).json()["choices"]
    tokens = choice["logprobs"]["content"]
    assert next(token["token"] for token in tokens) == "a"
    assert bytes(tokens[1]["bytes"] + tokens[2]["bytes"] + tokens[3]["bytes"]).decode() == "€"
    assert [len(token["top_logprobs"]) for token in tokens] == [2, 2, 2, 2]
    assert say(client, logprobs=True).json()["choices"][0]["logprobs"]["content"]


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(client):
    got = events(client, CHAT, messages=[{"role": "user", "content": "x"}], n=2)
    for index in range(2):
        mine = [c for event in got for c in event["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert "".join(piece["delta"].get("content", "") for piece in mine) == TEXT[:9]
        assert mine[-1]["delta"] == {}
        assert [piece["finish_reason"] for piece in mine if piece["finish_reason"]] == ["length"]
    assert all(event["object"] == "chat.completion.chunk" for event in got)


def test_streamed_characters_are_whole_and_every_token_is_scored(client, engine):
    engine.answer = lambda request, index: "€uro"
    got = events(
        client, CHAT, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=1
    )
    pieces = [choice for event in got for choice in event["choices"]]
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == "€uro"
    scored = [token for piece in pieces for token in (piece["logprobs"] or {}).get("content", ())]
    assert bytes(byte for token in scored for byte in token["bytes"]).decode() == "€uro"
