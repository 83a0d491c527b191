"""Forms of tool calls and reasoning in answers, by family of models."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """A family that writes a call as a JSON object with its name and arguments."""

    begin: str = ""
    """Stands before a call, or before all of them; "": calls are at the start of the answer."""
    end: str = ""
    arguments: str = "arguments"
    """Its key; the other usual ones are read too."""
    between: str = ""
    """What is written between two calls of one answer."""
    listed: bool = False
    """Calls stand in one JSON list."""
    named: bool = False
    """A call may also be its name followed by the object of its arguments."""
    optional_begin: str = ""
    """May stand before the first call, anywhere."""


@dataclass(frozen=True, slots=True)
class WholeCalls:
    """A family whose calls are read once the text from `begin` to `end` is complete."""

    begin: str
    end: str
    read: Callable[[str], list[tuple[str, dict[str, Any]]] | None]
    """The calls in what stands between, or None if it is no call."""
    at_start: bool = False
    """Only at the start of the answer."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A family that marks what it writes for itself."""

    begin: str = "<think>"
    end: str = "</think>"
    opened: bool = False
    """The answer begins inside, even if neither the prompt nor the answer holds the mark."""


def _python_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """`f(a=1), g(b="x")`, as Llama 4 and others write calls."""
    try:
        body = ast.parse(f"[{text}]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls = []
    for node in body.elts if isinstance(body, ast.List) else ():
        if not isinstance(node, ast.Call) or node.args:
            return None
        try:
            arguments = {each.arg or "": ast.literal_eval(each.value) for each in node.keywords}
            json.dumps(arguments)
        except (ValueError, TypeError, RecursionError):
            return None
        calls.append((ast.unparse(node.func), arguments))
    return calls


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>\n?(.*?)\n?</arg_value>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _tagged_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """`<function=f><parameter=a>1</parameter></function>`, as Qwen3-Coder writes calls."""
    found = _FUNCTION.fullmatch(text)
    if found is None:
        return None
    arguments = {name: _value(value) for name, value in _PARAMETER.findall(found[2])}
    return [(found[1].strip(), arguments)]


def _value(text: str) -> Any:
    """What JSON says, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _keyed_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """`f<arg_key>a</arg_key><arg_value>1</arg_value>`, as GLM-4.5 writes calls."""
    name = text.partition("<arg_key>")[0].strip()
    if _ARGUMENT.sub("", text).strip() != name:
        return None
    return [(name, {key.strip(): _value(value) for key, value in _ARGUMENT.findall(text)})]


def _json_behind(call: str) -> Callable[[str], list[tuple[str, dict[str, Any]]] | None]:
    """A reader of calls that each match `call`, whose groups are a name and the arguments' JSON."""
    pattern = re.compile(rf"\s*{call}\s*", re.DOTALL)

    def read(text: str) -> list[tuple[str, dict[str, Any]]] | None:
        calls, at = [], 0
        while at < len(text):
            found = pattern.match(text, at)
            arguments = _value(found[2]) if found is not None else None
            if found is None or not isinstance(arguments, dict):
                return None
            calls.append((found[1], arguments))
            at = found.end()
        return calls

    return read


_HERMES = JsonCalls("<tool_call>", "</tool_call>", between="\n")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
_FENCED = "function<｜tool▁sep｜>([^\\n]+)\n```json\n(.*?)\n```"
_BARE = "([^<\\s]+)<｜tool▁sep｜>(.*?)"
_KIMI_CALL = (
    r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+):\d+\s*"
    r"<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>"
)
TOOL_PARSERS: dict[str, JsonCalls | WholeCalls] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "qwen3_coder": WholeCalls("<tool_call>", "</tool_call>", _tagged_calls),
    "llama3": JsonCalls(arguments="parameters", between="; ", optional_begin="<|python_tag|>"),
    "mistral": JsonCalls("[TOOL_CALLS]", between=", ", listed=True, named=True),
    "pythonic": WholeCalls("[", "]", _python_calls, at_start=True),
    "json": JsonCalls(between=", ", listed=True),
    "deepseekv3": WholeCalls(*_DEEPSEEK, _json_behind(_DEEPSEEK_CALL.format(_FENCED))),
    "deepseekv31": WholeCalls(*_DEEPSEEK, _json_behind(_DEEPSEEK_CALL.format(_BARE))),
    "kimi_k2": WholeCalls(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _json_behind(_KIMI_CALL)
    ),
    "glm45": WholeCalls("<tool_call>", "</tool_call>", _keyed_calls),
}
REASONING_PARSERS: dict[str, Reasoning] = {
    "deepseek-r1": Reasoning(opened=True),
    "qwen3": Reasoning(),
    "qwen3-thinking": Reasoning(opened=True),
    "glm45": Reasoning(),
    "kimi": Reasoning("◁think▷", "◁/think▷"),
}
