"""Tools that a request offers, and the calls and reasoning that its answers hold.

Protocols share this: they bring tools as OpenAI's `tools` has them, take from `AnswerPlan` the
grammar and a parser for each answer, and write the parser's parts in their own form.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvweave.engine.types import GrammarSpec

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
    parallel: bool = True
    """Whether an answer may hold several calls."""

    @property
    def enforced(self) -> bool:
        return self.required or self.named is not None


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What a request's answers must look like, and how they are read."""

    grammar: GrammarSpec | None = None
    make_parser: Callable[[], AnswerParser] = AnswerParser
    shows_special: bool = False
    """Whether calls or reasoning are marked by special tokens: the text must then hold them."""
