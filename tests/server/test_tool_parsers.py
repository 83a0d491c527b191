"""Calls and reasoning in answers: by family, cut anywhere, and what only looks like a call."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.plugins import REASONING_PARSERS as REASONING_NAMES
from kvweave.plugins import TOOL_CALL_PARSERS
from kvweave.server.answer_plans import ReasoningParser, _tool_form
from kvweave.server.tool_parsers import make_tool_parser
from kvweave.server.tools import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    AnswerParser,
    ParsedAnswer,
    Reasoning,
    parse,
)

TOOLS = {"look", "add"}


def read(family, text):
    answer = parse(make_tool_parser(TOOL_PARSERS[family], TOOLS), text)
    return answer.text, [(call.name, call.arguments) for call in answer.calls]


def test_every_name_has_a_parser():
    assert set(TOOL_PARSERS) == set(TOOL_CALL_PARSERS)
    assert set(REASONING_PARSERS) == set(REASONING_NAMES)


TWO = [("look", '{"at": "a } \\" b"}'), ("add", '{"n": [1, {"x": 2}]}')]
WRITTEN = {
    "hermes": 'Well.\n<tool_call>\n{"name": "look", "arguments": {"at": "a } \\" b"}}\n'
    '</tool_call>\n<tool_call>\n{"arguments": {"n": [1, {"x": 2}]}, "name": "add"}\n</tool_call>\n',
    "qwen3_coder": 'Well.\n<tool_call>\n<function=look>\n<parameter=at>\na } " b\n</parameter>\n'
    "</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=n>\n"
    '[1, {"x": 2}]\n</parameter>\n</function>\n</tool_call>',
    "deepseekv3": "Well.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
    '```json\n{"at": "a } \\" b"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
    '<｜tool▁sep｜>add\n```json\n{"n": [1, {"x": 2}]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseekv31": "Well.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
    '{"at": "a } \\" b"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>'
    '{"n": [1, {"x": 2}]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "Well. <|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
    '<|tool_call_argument_begin|>{"at": "a } \\" b"}<|tool_call_end|><|tool_call_begin|>'
    'functions.add:1<|tool_call_argument_begin|>{"n": [1, {"x": 2}]}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "glm45": 'Well.\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>a } " b</arg_value>\n'
    "</tool_call>\n<tool_call>add\n<arg_key>n</arg_key>\n"
    '<arg_value>[1, {"x": 2}]</arg_value>\n</tool_call>',
    "llama3": '{"name": "look", "parameters": {"at": "a } \\" b"}}; '
    '{"name": "add", "parameters": {"n": [1, {"x": 2}]}}',
    "mistral": 'Well. [TOOL_CALLS] [{"name": "look", "arguments": {"at": "a } \\" b"}}, '
    '{"name": "add", "arguments": {"n": [1, {"x": 2}]}}]',
    "pythonic": '[look(at="a } \\" b"), add(n=[1, {"x": 2}])]',
    "json": ' [{"name": "look", "arguments": {"at": "a } \\" b"}},\n'
    '{"name": "add", "arguments": {"n": [1, {"x": 2}]}}]',
}


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name}}", "deepseekv3"),
        ("{{'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments}}", "deepseekv31"),
        ("<|tool_calls_section_begin|>{{calls}}", "kimi_k2"),
        ("<tool_call>{{name}}\n<arg_key>{{key}}</arg_key>", "glm45"),
        ("<tool_call>\n<function={{name}}>", "qwen3_coder"),
        ("<tool_call>{{call}}</tool_call>", "hermes"),
        ("{{content}}", "hermes"),
    ],
)
def test_the_template_chooses_the_family(template, family):
    assert _tool_form("auto", template) is TOOL_PARSERS[family]


@pytest.mark.parametrize("family", WRITTEN)
def test_calls_are_read_as_their_family_writes_them(family):
    text, calls = read(family, WRITTEN[family])
    assert calls == TWO
    assert text == ("Well." if "Well." in WRITTEN[family] else "")


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call> is a mark"),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call> so'),
        ("hermes", '<tool_call>{"name": "look", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": {at}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", "a <tool_cal"),
        ("hermes", " white space stays \n"),
        ("llama3", '{"answer": 5}'),
        ("llama3", 'See {"name": "look", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] none"),
        ("mistral", '[TOOL_CALLS]other{"a": 1}'),
        ("pythonic", "[1, 2] is a list"),
        ("pythonic", "[look(x)]"),
        ("pythonic", "[look(at="),
        ("qwen3_coder", '<tool_call>{"name": "look"}</tool_call>'),
        ("json", "[1, 2]"),
        ("glm45", '<tool_call>{"name": "look"}</tool_call>'),
        ("glm45", "<tool_call>look <arg_key>at</arg_key></tool_call>"),
        ("deepseekv3", "<｜tool▁calls▁begin｜>look<｜tool▁calls▁end｜>"),
        ("deepseekv31", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>look:0<|tool_call_argument_begin|>1"
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
    ],
)
def test_what_only_looks_like_a_call_stays_text(family, text):
    assert read(family, text) == (text, [])


@pytest.mark.parametrize(
    ("family", "text", "calls", "rest"),
    [
        ("hermes", '<tool_call>{"name": "add"}</tool_call> then', [("add", "{}")], "then"),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": "{\\"n\\": 1}"}</tool_call>',
            [("add", '{"n": 1}')],
            "",
        ),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"n"', [("add", '{"n"')], ""),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"n": 1}', [("add", '{"n": 1}')], ""),
        (
            "mistral",
            '[TOOL_CALLS]add{"n": 1}[TOOL_CALLS]look{}',
            [*[("add", '{"n": 1}')], ("look", "{}")],
            "",
        ),
        ("llama3", 'So <|python_tag|>{"name": "add", "parameters": {}}', [("add", "{}")], "So"),
    ],
)
def test_other_spellings(family, text, calls, rest):
    assert read(family, text) == (rest, calls)


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "look", "add"),
        *('{"name": "look", "arguments": {"at": "x"}}', '{"name": "add", "parameters": {}}'),
        *("look(at=1)", "[", "]", "{", "}", '"', "\\", ",", ";", ":", " ", "\n", "<", "é"),
        *(
            "<function=look>",
            "<parameter=at>",
            "</parameter>",
            "</function>",
            "<think>",
            "</think>",
            "<arg_key>at</arg_key>",
            "<arg_value>1</arg_value>",
            *WRITTEN.values(),
        ),
    ]
)


def reassembled(parser, text, cuts):
    """The answer as a stream brings it, and what each call's parts were."""
    answer, at = ParsedAnswer(), 0
    for cut in sorted(cut % (len(text) + 1) for cut in cuts):
        answer.extend(parser.feed(text[at:cut]))
        at = cut
    answer.extend(parser.feed(text[at:]))
    answer.extend(parser.finish())
    return answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.calls]


@settings(max_examples=300, deadline=None)
@given(
    family=st.sampled_from(sorted(TOOL_PARSERS)),
    text=st.one_of(
        st.lists(PIECES, max_size=14).map("".join), st.sampled_from(sorted(WRITTEN.values()))
    ),
    reasons=st.sampled_from([None, False, True]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_where_a_stream_is_cut_changes_nothing(family, text, reasons, cuts):
    def parser():
        tools = make_tool_parser(TOOL_PARSERS[family], TOOLS)
        return (
            tools if reasons is None else ReasoningParser(Reasoning(), opened=reasons, then=tools)
        )

    whole = reassembled(parser(), text, [])
    assert reassembled(parser(), text, cuts) == whole
    assert reassembled(parser(), text, range(len(text))) == whole
    if reasons is None and not whole[2]:
        assert whole[0] == text


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "rest"),
    [
        ("<think>\nHm. </think>\n\nYes.", False, "\nHm.", "Yes."),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("Yes <think>", False, "", "Yes <think>"),
        ("Hm, it never", True, "Hm, it never", ""),
    ],
)
def test_reasoning_is_split_off(text, opened, reasoning, rest):
    answer = parse(ReasoningParser(Reasoning(), opened=opened, then=AnswerParser()), text)
    assert (answer.reasoning, answer.text) == (reasoning, rest)


def test_arguments_are_streamed_before_they_end():
    parser = make_tool_parser(TOOL_PARSERS["hermes"], TOOLS)
    parts = parser.feed('<tool_call>{"name": "look", "arguments": {"at": "he')
    assert [(part.name, part.arguments) for part in parts] == [("look", '{"at": "he')]
    (more,) = parser.feed("re")
    assert (more.id, more.index, more.arguments) == (None, 0, "re")
    assert json.loads('{"at": "he' + more.arguments + '"}')
