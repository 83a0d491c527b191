"""Changes the order of a conversation before it is rendered, so that more of it is cached.

`reorder`: the parts of a message that the client lets move are ordered by what is cached of them.
The pieces serve to find an order; the prompt is then rendered and tokenised as a whole, as if the
client had sent it in that order.

`move_volatile_head`: agents put request ids, dates and checksums before everything else; an exact
prefix then ends in the first line of every prompt. The operator declares such lines
(--volatile-head), a request asks for the move, and its answer says which lines were moved.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from kvweave.errors import RequestError
from kvweave.kv.pool import IntArray
from kvweave.reorder import Pieces, Proposal, confirmed, propose, tokens_within
from kvweave.server.fields import MAX_MOVABLE
from kvweave.server.prompts import PART_END, ChatPrompt, Conversation, PromptReader
from kvweave.server.streaming import ServingEngine

if TYPE_CHECKING:
    from kvweave.engine.engine import Engine


class Reorder(BaseModel):
    """Neighbouring parts of a message's content that may change places, counted from 0."""

    # An unknown field may be misspelt, and would change the prompt.
    model_config = ConfigDict(extra="forbid", strict=True)

    message: int | None = None
    """None: the last one."""
    parts: list[int] = Field(min_length=2, max_length=MAX_MOVABLE)

    def place(self, messages: Sequence[Any]) -> int:
        """The index of its message."""
        return len(messages) - 1 if self.message is None else self.message

    def check(self, messages: Sequence[Any]) -> None:
        """RequestError if it names a message or parts that do not exist or cannot be reordered."""
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


async def ordered(
    reader: PromptReader,
    engine: ServingEngine,
    chat: ChatPrompt,
    reorder: Reorder,
    cache_salt: str | None,
) -> tuple[Conversation, dict[str, Any]]:
    """The prompt, and a report of its order for the client.

    The order is chosen by the KV that is cached now, under the request's salt; the parts stay as
    given if no order is cached better.
    """
    frame = _Frame(chat, reorder)
    prompt = await reader.conversation(chat)
    given = _array(prompt.ids)
    marked = reader.render(frame.around(frame.mark))
    pieces = await asyncio.to_thread(frame.pieces, marked, reader.encode_plain)

    def search(engine: Engine) -> Proposal:
        known = engine.prefixes(cache_salt)
        proposal = propose(pieces, known)
        return proposal if proposal.gain else confirmed(known, proposal, given, given)

    proposal = await engine.run_on_engine_thread(search)
    if proposal.gain:
        proposed = await reader.conversation(frame.in_order(proposal.order))
        whole, expected = _array(proposed.ids), proposal

        def confirm(engine: Engine) -> Proposal:
            return confirmed(engine.prefixes(cache_salt), expected, given, whole)

        proposal = await engine.run_on_engine_thread(confirm)
        prompt = proposed if proposal.gain else prompt
    return prompt, frame.report(proposal)


class _Frame:
    """A conversation around the parts that may move."""

    def __init__(self, chat: ChatPrompt, reorder: Reorder) -> None:
        self.mark = f"parts{uuid.uuid4().hex}"
        """Stands for all movable parts, and occurs nowhere else."""
        self._at = reorder.place(chat.messages)
        self._chat = chat
        self._first, end = min(reorder.parts), max(reorder.parts) + 1
        content = chat.messages[self._at]["content"]
        assert isinstance(content, tuple)  # else refused
        self._before, self._after = content[: self._first], content[end:]
        self._movable = content[self._first : end]

    def around(self, *parts: str) -> ChatPrompt:
        """The conversation with `parts` in place of the movable ones."""
        messages = list(self._chat.messages)
        content = (*self._before, *parts, *self._after)
        messages[self._at] = {**messages[self._at], "content": content}
        return replace(self._chat, messages=messages)

    def in_order(self, order: Sequence[int]) -> ChatPrompt:
        """The conversation with its movable parts in another order."""
        return self.around(*(self._movable[at] for at in order))

    def pieces(self, marked: str, encode: Callable[[str], Sequence[int]]) -> Pieces:
        """The tokens around the mark in a rendered conversation, and of each movable part.

        Every part ends in a line's end, as if none were the last. RequestError if the chat template
        does not write the mark once and unchanged.
        """
        head, *rest = marked.split(self.mark)
        if len(rest) != 1:
            raise RequestError(
                "this model's chat template does not write a message's parts down once and as they "
                "are, so that they cannot be reordered",
                param="reorder",
            )
        tail = rest[0][len(PART_END) :] if self._after else rest[0]
        movable = [tokens_within(encode, part + PART_END) for part in self._movable]
        return Pieces(_array(encode(head)), movable, tokens_within(encode, tail))

    def report(self, proposal: Proposal) -> dict[str, Any]:
        """The order that was used and its cached tokens, for the client."""
        return {
            "message": self._at,
            "parts": [self._first + at for at in proposal.order],
            "cached_tokens": proposal.exact,
            "cached_tokens_as_given": proposal.exact_as_given,
        }


def _array(tokens: Sequence[int]) -> IntArray:
    return np.array(tokens, np.int32)


_ROLES = ("system", "developer")


class VolatileHead:
    """Lines that begin as one of the regular expressions describes."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]

    def moved(self, chat: ChatPrompt) -> tuple[ChatPrompt, dict[str, Any]]:
        """The conversation with its declared lines at the end of the system text, and a report.

        The report has the `message` and its moved `lines`, counted from 0 through all parts.
        RequestError if nothing is declared.
        """
        if not self._patterns:
            raise RequestError(
                "this server declares no lines that change with every call (--volatile-head)",
                param="move_volatile_head",
            )
        first = chat.messages[0]
        if first["role"] not in _ROLES:
            return chat, {"message": None, "lines": []}
        content = first.get("content") or ""
        parts = (content,) if isinstance(content, str) else content
        kept, moved, places = [], [], []
        at = 0
        for part in parts:
            stay = []
            for line in part.split("\n"):
                if any(pattern.match(line) for pattern in self._patterns):
                    moved.append(line)
                    places.append(at)
                else:
                    stay.append(line)
                at += 1
            kept.append("\n".join(stay))
        report = {"message": 0, "lines": places}
        if not moved:
            return chat, report
        whole: Any = (*kept, "\n".join(moved))
        if isinstance(content, str):
            whole = "\n".join(part for part in whole if part)
        messages = [{**first, "content": whole}, *chat.messages[1:]]
        return replace(chat, messages=messages), report
