"""Parsers that find tool calls in answers, as each family of models writes them.

A parser gets an answer piece by piece. What it makes of the whole depends on the whole text only,
not on where the pieces end. Text that only looks like a call stays text. A call is one once its
name is among the request's tools and its arguments have begun; from then on they are streamed.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection

from kvweave.server.tools import (
    AnswerParser,
    AnswerPart,
    CallPart,
    JsonCalls,
    TextPart,
    WholeCalls,
    call_id,
    overlap,
)

_ARGUMENTS = ("arguments", "parameters")


class _ObjectScanner:
    """Follows one JSON object through a growing text and finds its top-level values."""

    def __init__(self) -> None:
        self.at = 0
        self.values: dict[str, tuple[int, int | None]] = {}
        """By key: where its value starts and ends in the text; None while it goes on."""
        self.end: int | None = None
        """Where the object ends."""
        self.bad = False
        """It is none."""
        self._depth = 0
        self._quote: int | None = None
        self._escaped = False
        self._key: str | None = None
        self._open: str | None = None
        """The key whose value has started."""

    def advance(self, text: str) -> None:
        """Read on to the end of `text`, or of the object."""
        while self.at < len(text) and self.end is None and not self.bad:
            self._read(text, text[self.at])
            self.at += 1

    def _read(self, text: str, char: str) -> None:
        if self._quote is not None:
            self._in_string(text, char)
        elif char == '"':
            self._quote = self.at
            self._begin_value()
        elif char in "{[":
            self._begin_value()
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value(self.at)
                self.end = self.at + 1
            elif self._depth == 1:
                self._end_value(self.at + 1)
        elif self._depth == 1 and char == ",":
            self._end_value(self.at)
        elif not char.isspace() and not (self._depth == 1 and char == ":"):
            self._begin_value()
            self.bad = self._depth == 1 and self._open is None

    def _in_string(self, text: str, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            if self._depth == 1 and self._open is None:
                try:
                    self._key = json.loads(text[self._quote : self.at + 1])
                except ValueError:
                    self.bad = True
            elif self._depth == 1:
                self._end_value(self.at + 1)
            self._quote = None

    def _begin_value(self) -> None:
        if self._depth == 1 and self._open is None and self._key is not None:
            self._open, self._key = self._key, None
            self.values[self._open] = (self.at, None)

    def _end_value(self, end: int) -> None:
        if self._open is not None:
            self.values[self._open] = (self.values[self._open][0], end)
            self._open = None

    def raw(self, text: str, key: str) -> str | None:
        """The text of a value that is complete."""
        start, end = self.values.get(key, (0, None))
        return None if end is None else text[start:end].strip()


class _Call:
    """One call that is being read: an object with name and arguments, or arguments after a name."""

    def __init__(self, tools: Collection[str], name: str | None = None) -> None:
        self._tools = tools
        self._scanner = _ObjectScanner()
        self.name = name
        self._sent = 0
        self.bad = False

    @property
    def end(self) -> int | None:
        return self._scanner.end

    def advance(self, text: str) -> str:
        """The arguments that are new and certain; "" until the call is one."""
        self._scanner.advance(text)
        self.bad = self._scanner.bad
        if self.bad:
            return ""
        if self.name is None:
            self._read_name(text)
            if self.name is None:
                self.bad = self.bad or self.end is not None
                return ""
        if self.name not in self._tools:
            self.bad = True
            return ""
        start, end = self._arguments(text)
        if start is None:
            return self._once("{}") if self.end is not None else ""
        if text[start : start + 1] == '"':  # a text that holds the object
            return self._once(_unquoted(text[start:end])) if end is not None else ""
        stop = len(text) if end is None else end
        if not self._sent:
            inner = text[start + 1 : stop].lstrip()
            if not inner:
                return ""
            if text[start] != "{" or inner[0] not in '"}':
                self.bad = True
                return ""
        new = text[start + self._sent : stop]
        self._sent += len(new)
        return new

    def _read_name(self, text: str) -> None:
        if (raw := self._scanner.raw(text, "name")) is not None:
            try:
                name = json.loads(raw)
            except ValueError:
                name = None
            self.bad = not isinstance(name, str)
            self.name = name if isinstance(name, str) else None

    def _arguments(self, text: str) -> tuple[int | None, int | None]:
        for key in _ARGUMENTS:
            if key in self._scanner.values:
                return self._scanner.values[key]
        return None, None

    def _once(self, arguments: str) -> str:
        if self._sent:
            return ""
        self._sent = len(arguments)
        return arguments


class _NamedCall(_Call):
    """The object is the arguments themselves; the name stood before it."""

    def _arguments(self, text: str) -> tuple[int | None, int | None]:
        start = text.find("{")
        return (None if start < 0 else start), self.end


def _unquoted(raw: str) -> str:
    try:
        text = json.loads(raw)
    except ValueError:
        return raw
    return text if isinstance(text, str) else raw


class _ToolParser(AnswerParser, ABC):
    """Finds where calls begin, and holds back text that may be such a beginning.

    White space around calls belongs to none.
    """

    def __init__(self, tools: Collection[str], begins: tuple[str, ...], *, at_start: bool) -> None:
        """`at_start`: a call may also begin without any of `begins`, at the start of the answer."""
        self._tools = tools
        self._begins = tuple(begin for begin in begins if begin)
        self._held = ""
        """Text that has not been told yet."""
        self._fresh = at_start
        """Whether nothing was told so far, so that a call may begin without a mark."""
        self._inside = False
        """`_held` begins with a call, or with what may be one."""
        self._after_call = False
        """The next white space stands behind a call."""
        self._blank = ""
        """White space before what may be a call."""
        self._calls = 0

    def feed(self, text: str) -> list[AnswerPart]:
        self._held += text
        parts: list[AnswerPart] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while self._held:
            if self._inside:
                self._end(parts)
            elif not self._step(parts):
                self._tell(parts, self._held)
                self._held = ""
        return parts

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Whether more may be done with what is held."""
        return self._read(parts) if self._inside else self._search(parts)

    def _search(self, parts: list[AnswerPart]) -> bool:
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held
        found = min(
            ((at, begin) for begin in self._begins if (at := self._held.find(begin)) >= 0),
            default=None,
        )
        if self._fresh:
            bare = self._held.lstrip()
            if bare and self._may_begin(bare):
                self._blank = self._held[: -len(bare)]
                self._held, self._inside = bare, True
                self._start("")
                return True
            if bare:
                self._fresh = any(begin.startswith(bare) for begin in self._begins)
        if found is not None:
            at, begin = found
            before = self._held[:at].rstrip()
            self._tell(parts, before)
            self._blank = self._held[len(before) : at]
            self._held, self._inside = self._held[at:], True
            self._start(begin)
            return True
        keep = max((overlap(self._held, begin) for begin in self._begins), default=0)
        certain = self._held[: len(self._held) - keep].rstrip()
        self._tell(parts, certain)
        self._held = self._held[len(certain) :]
        return False

    def _tell(self, parts: list[AnswerPart], text: str) -> None:
        if text:
            parts.append(TextPart(text))

    def _give_up(self, parts: list[AnswerPart], length: int) -> None:
        """The first `length` characters held are text after all."""
        parts.append(TextPart(self._blank + self._held[:length]))
        self._held, self._blank = self._held[length:], ""
        self._inside = self._fresh = False

    def _leave(self, length: int) -> None:
        """The first `length` characters held were calls, and are told."""
        self._held, self._blank = self._held[length:], ""
        self._inside = self._fresh = False
        self._after_call = True

    def _announce(self, parts: list[AnswerPart], name: str, arguments: str) -> None:
        parts.append(CallPart(self._calls, arguments, call_id(), name))
        self._calls += 1

    # What depends on the family:

    @abstractmethod
    def _may_begin(self, text: str) -> bool:
        """Whether `text`, at the answer's start, may be a call without a mark."""

    @abstractmethod
    def _start(self, begin: str) -> None:
        """`_held` begins with `begin`."""

    @abstractmethod
    def _read(self, parts: list[AnswerPart]) -> bool:
        """Read on inside; whether more may be done."""

    @abstractmethod
    def _end(self, parts: list[AnswerPart]) -> None:
        """Nothing follows; `_held` must get shorter."""


class JsonToolParser(_ToolParser):
    """Calls as JSON objects; their arguments are streamed."""

    def __init__(self, form: JsonCalls, tools: Collection[str]) -> None:
        super().__init__(tools, (form.begin, form.optional_begin), at_start=not form.begin)
        self._form = form
        self._at = 0
        """How much of `_held` is read: marks, and calls that are told."""
        self._began = 0
        self._call: _Call | None = None
        self._told = False
        self._listed = False
        """Whether a list of calls is open."""

    def _may_begin(self, text: str) -> bool:
        return text.startswith("[" if self._form.listed else "{")

    def _start(self, begin: str) -> None:
        self._at = self._began = len(begin)
        self._call, self._told, self._listed = None, False, False

    def _read(self, parts: list[AnswerPart]) -> bool:
        if self._call is None and not self._begin_call(parts):
            return False
        call = self._call
        if call is None:
            return True
        arguments = call.advance(self._held[self._at :])
        if arguments and not self._told_call:
            self._announce(parts, call.name or "", arguments)
            self._told_call = self._told = True
        elif arguments:
            parts.append(CallPart(self._calls - 1, arguments))
        if call.bad and not self._told_call:
            self._refuse(parts)
            return True
        if call.bad or call.end is not None:
            self._at += call.end if call.end is not None else len(self._held) - self._at
            self._call = None
            return True
        return False

    _told_call = False

    def _begin_call(self, parts: list[AnswerPart]) -> bool:
        """Read what stands before a call; whether more may be done."""
        rest = self._held[self._at :]
        bare = rest.lstrip()
        if not bare:
            return False
        self._at += len(rest) - len(bare)
        form = self._form
        if bare[0] == "{":
            self._call, self._told_call = _Call(self._tools), False
        elif bare[0] == "[" and form.listed and not self._listed and not self._told:
            self._listed = True
            self._at += 1
        elif self._told and bare[0] in ",;" and (self._listed or form.between.strip()):
            self._at += 1
        elif self._told and self._listed and bare[0] == "]":
            self._at += 1
            self._leave(self._at)
        elif self._told and form.end and form.end.startswith(bare[: len(form.end)]):
            if len(bare) < len(form.end):
                return False
            self._leave(self._at + len(form.end))
        elif form.named and not self._listed and (name := re.match(r"[\w.-]+", bare)):
            return self._begin_named(parts, bare, name.end())
        else:
            self._refuse(parts)
        return True

    def _begin_named(self, parts: list[AnswerPart], bare: str, end: int) -> bool:
        after = bare[end:]
        if not after or "[ARGS]".startswith(after):
            return False
        mark = len("[ARGS]") if after.startswith("[ARGS]") else 0
        if not after[mark:].lstrip():
            return False
        if not after[mark:].lstrip().startswith("{"):
            self._refuse(parts)
            return True
        self._call, self._told_call = _NamedCall(self._tools, bare[:end]), False
        self._at += end + mark
        return True

    def _refuse(self, parts: list[AnswerPart]) -> None:
        """What follows is no call: the calls before it are told, all else is text."""
        if self._told:
            self._leave(self._at)
        else:
            # At least one character, or the same place would be tried again.
            self._give_up(parts, max(self._began, 1))
        self._call = None

    def _end(self, parts: list[AnswerPart]) -> None:
        if self._call is not None and self._told_call:
            self._leave(len(self._held))
            self._call = None
        else:
            self._refuse(parts)


class WholeToolParser(_ToolParser):
    """Calls that are read when their text is complete, each then told at once."""

    def __init__(self, form: WholeCalls, tools: Collection[str]) -> None:
        super().__init__(tools, () if form.at_start else (form.begin,), at_start=form.at_start)
        self._form = form

    def _may_begin(self, text: str) -> bool:
        begin = self._form.begin
        return text.startswith(begin)

    def _start(self, begin: str) -> None:
        self._searched = 0

    def _read(self, parts: list[AnswerPart]) -> bool:
        begin, end = self._form.begin, self._form.end
        while (at := self._held.find(end, max(self._searched, len(begin)))) >= 0:
            calls = self._form.read(self._held[len(begin) : at])
            if calls and all(name in self._tools for name, _ in calls):
                for name, arguments in calls:
                    self._announce(parts, name, json.dumps(arguments, ensure_ascii=False))
                self._leave(at + len(end))
                return True
            self._searched = at + 1
            if not self._form.at_start:
                self._give_up(parts, len(begin))
                return True
        return False

    def _end(self, parts: list[AnswerPart]) -> None:
        self._give_up(parts, len(self._form.begin))


def make_tool_parser(form: JsonCalls | WholeCalls, tools: Collection[str]) -> AnswerParser:
    """A parser of one answer, for calls of `tools`."""
    if isinstance(form, JsonCalls):
        return JsonToolParser(form, tools)
    return WholeToolParser(form, tools)
