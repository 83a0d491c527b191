"""Parser that splits what a model writes for itself from its answer."""

from __future__ import annotations

from kvweave.server.tool_forms import Reasoning
from kvweave.server.tools import AnswerParser, AnswerPart, ReasoningPart, overlap


class ReasoningParser(AnswerParser):
    """Splits the reasoning off, and hands what follows to `then`."""

    def __init__(self, form: Reasoning, *, opened: bool, then: AnswerParser) -> None:
        """`opened`: the answer begins inside the reasoning."""
        self._form = form
        self._then = then
        self._held = ""
        self._state = "inside" if opened else "before"

    def feed(self, text: str) -> list[AnswerPart]:
        if self._state == "after":
            return self._then.feed(text)
        self._held += text
        if self._state == "before" and not self._begin():
            return []
        if self._state == "after":
            held, self._held = self._held, ""
            return self._then.feed(held)
        return self._inside()

    def finish(self) -> list[AnswerPart]:
        held, self._held = self._held, ""
        if self._state == "inside":
            return [*_reasoning(held.rstrip()), *self._then.finish()]
        return [*self._then.feed(held), *self._then.finish()]

    def _begin(self) -> bool:
        """Whether it is settled if the answer begins with reasoning."""
        bare, begin = self._held.lstrip(), self._form.begin
        if len(bare) < len(begin) and begin.startswith(bare):
            return False
        self._state = "after"
        if bare.startswith(begin):
            self._state, self._held = "inside", bare[len(begin) :]
        return True

    def _inside(self) -> list[AnswerPart]:
        # A model whose prompt opened its reasoning may open it once more.
        end = self._form.end
        at = self._held.find(end)
        if at < 0:
            keep = overlap(self._held, end)
            certain = self._held[: len(self._held) - keep].rstrip()
            self._held = self._held[len(certain) :]
            return _reasoning(certain)
        reasoning, rest = self._held[:at].rstrip(), self._held[at + len(end) :]
        self._held = ""
        self._then = _WithoutLeadingSpace(self._then)
        self._state = "after"
        return [*_reasoning(reasoning), *self._then.feed(rest)]


def _reasoning(text: str) -> list[AnswerPart]:
    return [ReasoningPart(text)] if text else []


class _WithoutLeadingSpace(AnswerParser):
    """The answer after reasoning: its first line breaks belong to neither."""

    def __init__(self, then: AnswerParser) -> None:
        self._then = then
        self._begun = False

    def feed(self, text: str) -> list[AnswerPart]:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return self._then.feed(text)

    def finish(self) -> list[AnswerPart]:
        return self._then.finish()
