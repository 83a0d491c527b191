"""Messages of a conversation, and which parts of one may change places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvweave.errors import RequestError
from kvweave.server.fields import MAX_MOVABLE, Content

PART_END = "\n"
"""Stands between two parts of a message's content."""


class ChatMessage(BaseModel):
    """One message; what else it carries (name, tool_calls, ...) goes to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: Content = None

    def as_said(self) -> dict[str, Any]:
        """As chat templates want it: parts of the content joined by line ends, as others do."""
        said = self.model_dump(exclude_unset=True)
        if isinstance(self.content, tuple):
            said["content"] = PART_END.join(self.content)
        return said


class Reorder(BaseModel):
    """Neighbouring parts of one message's content that may change places, counted from 0."""

    # A field that is not known may be one that is misspelt, and here that changes the prompt.
    model_config = ConfigDict(extra="forbid", strict=True)

    message: int | None = None
    """The last one without it."""
    parts: list[int] = Field(min_length=2, max_length=MAX_MOVABLE)

    def place(self, messages: Sequence[ChatMessage]) -> int:
        """The message that it is about."""
        return len(messages) - 1 if self.message is None else self.message

    def check(self, messages: Sequence[ChatMessage]) -> None:
        """RequestError if it names what is not there, or what cannot be reordered."""
        at = self.place(messages)
        if not 0 <= at < len(messages):
            raise RequestError(
                f"reorder.message is {at}, but messages go from 0 to {len(messages) - 1}",
                param="reorder.message",
            )
        content = messages[at].content
        if not isinstance(content, tuple):
            raise RequestError(
                f"reorder names parts of messages.{at}.content, which is not a list of parts",
                param="reorder.message",
            )
        first, last = min(self.parts), max(self.parts)
        if first < 0 or last >= len(content):
            raise RequestError(
                f"reorder.parts names part {first if first < 0 else last}, but those of "
                f"messages.{at}.content go from 0 to {len(content) - 1}",
                param="reorder.parts",
            )
        if sorted(self.parts) != list(range(first, last + 1)):
            raise RequestError(
                "reorder.parts must be neighbours, each named once, so that nothing else moves: "
                f"not {self.parts}",
                param="reorder.parts",
            )
