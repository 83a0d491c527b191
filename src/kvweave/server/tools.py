"""Tools that a request offers, the calls and reasoning that its answers hold, and their forms.

Protocols share this: they bring tools as OpenAI's `tools` has them, take from `AnswerPlan` the
grammar and a parser for each answer, and write the parser's parts in their own form.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvweave.engine.types import GrammarSpec
from kvweave.errors import RequestError


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


MAX_CALLS = 16
"""Of one answer whose calls are enforced: a model could go on for ever."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Text that the model wrote for itself before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A fragment of the arguments of call `index`; its first part has `id` and `name`."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


AnswerPart: TypeAlias = TextPart | ReasoningPart | CallPart


@dataclass(slots=True)
class ToolCall:
    """A whole call. `arguments` is JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ParsedAnswer:
    """What the parts of an answer add up to."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def extend(self, parts: Iterable[AnswerPart]) -> None:
        for part in parts:
            if isinstance(part, TextPart):
                self.text += part.text
            elif isinstance(part, ReasoningPart):
                self.reasoning += part.text
            elif part.name is not None:
                self.calls.append(ToolCall(part.id or "", part.name, part.arguments))
            else:
                self.calls[part.index].arguments += part.arguments


class AnswerParser:
    """Splits one growing answer into parts. Here: all of it is text."""

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that are certain now that `text` follows."""
        return [TextPart(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        """The parts held back, now that nothing follows."""
        return []


class CallsOnly(AnswerParser):
    """An answer whose calls are enforced: other text is the start of a call that was cut off."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[AnswerPart]:
        return [part for part in self._parser.feed(text) if not isinstance(part, TextPart)]

    def finish(self) -> list[AnswerPart]:
        return [part for part in self._parser.finish() if not isinstance(part, TextPart)]


def overlap(text: str, begin: str) -> int:
    """How long a proper beginning of `begin` the text ends with."""
    for length in range(min(len(begin) - 1, len(text)), 0, -1):
        if text.endswith(begin[:length]):
            return length
    return 0


def parse(parser: AnswerParser, text: str) -> ParsedAnswer:
    """A whole answer at once."""
    answer = ParsedAnswer()
    answer.extend(parser.feed(text))
    answer.extend(parser.finish())
    return answer


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether an answer calls tools: it may, must (`required`), or must call the one `named`."""

    tools: Sequence[Mapping[str, Any]] = ()
    """As OpenAI's field has them: {"type": "function", "function": {"name", "parameters"}}."""
    required: bool = False
    named: str | None = None
    allowed: Sequence[str] | None = None
    """Names of those that may be called; None: all."""
    parallel: bool = True
    """Whether an answer may hold several calls."""

    @property
    def offered(self) -> list[Mapping[str, Any]]:
        """The tools that an answer may call."""
        names = self.allowed if self.named is None else [self.named]
        return [tool for tool in self.tools if names is None or tool["function"]["name"] in names]

    @property
    def enforced(self) -> bool:
        return self.required or self.named is not None


_NAME = re.compile(r"[\w.:/-]{1,128}")


def tool_choice(tools: Any, choice: Any, *, parallel: bool = True) -> ToolChoice:
    """OpenAI's fields `tools` and `tool_choice`, checked. RequestError says what is wrong."""
    names = [_name(tool) for tool in tools or ()]
    if choice in (None, "none", "auto", "required"):
        if choice == "none":
            return ToolChoice()
        if choice == "required" and not names:
            raise RequestError("tool_choice is required, but tools are none", param="tool_choice")
        return ToolChoice(tools=tools or (), required=choice == "required", parallel=parallel)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            raise RequestError(
                "allowed_tools has a mode, auto or required, and tools", param="tool_choice"
            )
        found = [_known(_name(tool), names) for tool in listed]
        return ToolChoice(
            tools=tools, required=mode == "required", allowed=found, parallel=parallel
        )
    if kind != "function":
        raise RequestError(
            "tool_choice is none, auto, required, or names a function, not "
            f"{choice if isinstance(choice, str) else kind!r:.80}",
            param="tool_choice",
        )
    return ToolChoice(tools=tools, named=_known(_name(choice), names), parallel=False)


def _name(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    function = tool.get("function") if kind == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if function is None or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            'a tool is {"type": "function", "function": {"name": ..., "parameters": ...}}; its '
            "name has up to 128 letters, digits and any of _ . : / -",
            param="tools",
        )
    if not isinstance(function.get("parameters") or {}, dict):
        raise RequestError(f"the parameters of {name} are a JSON schema", param="tools")
    return name


def _known(name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise RequestError(
            f"tool_choice names {name}, which is not among the tools", param="tool_choice"
        )
    return name


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What a request's answers must look like, and how they are read; AnswerPlanner makes it."""

    grammar: GrammarSpec | None = None
    make_parser: Callable[[], AnswerParser] = AnswerParser
    shows_special: bool = False
    """Whether calls or reasoning are marked by special tokens: the text must then hold them."""


CALLS_AS_TEXT = ("<tool_call>", "</tool_call>")
"""Marks of calls in prompts whose chat template knows none; the parser `hermes` reads them."""


def described(tools: Iterable[Mapping[str, Any]]) -> str:
    """A system text that tells a model of its tools, for chat templates that know none."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    begin, end = CALLS_AS_TEXT
    return (
        f"You can call these functions:\n{functions}\n"
        "To call one, write its name and arguments as JSON, like this:\n"
        f'{begin}\n{{"name": "...", "arguments": {{...}}}}\n{end}\n'
        "Its result follows in <tool_response>."
    )


def without_calls(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with calls and their results as text, for chat templates that know none.

    Contents must be texts. Results stand in one turn of the user.
    """
    found: list[dict[str, Any]] = []
    begin, end = CALLS_AS_TEXT
    for message in messages:
        role, content = message["role"], message["content"]
        if message.get("tool_calls"):
            calls = [
                f"{begin}\n{json.dumps(_call(each['function']), ensure_ascii=False)}\n{end}"
                for each in message["tool_calls"]
            ]
            content = "\n".join([*([content] if content else ()), *calls])
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if found and found[-1].get("tool_call_id") is not None:
                found[-1]["content"] += f"\n{content}"
                continue
            found.append({"role": "user", "content": content, "tool_call_id": ""})
            continue
        found.append(
            {**{name: value for name, value in message.items() if name != "tool_calls"}}
            | {"content": content}
        )
    return found


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function.get("name"), "arguments": function.get("arguments") or {}}
