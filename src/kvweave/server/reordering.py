"""Orders the parts of a message that the client lets move by what is cached of them.

The pieces serve to find an order; the prompt is then rendered and tokenised as a whole, as if the
client had sent it in that order.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvweave.errors import RequestError
from kvweave.kv.pool import IntArray
from kvweave.reorder import Pieces, Proposal, confirmed, propose, tokens_within
from kvweave.server.prompts import PART_END, ChatPrompt, Conversation, PromptReader
from kvweave.server.protocol import Reorder
from kvweave.server.service import ServingEngine

if TYPE_CHECKING:
    from kvweave.engine.engine import Engine


async def ordered(
    reader: PromptReader,
    engine: ServingEngine,
    chat: ChatPrompt,
    reorder: Reorder,
    cache_salt: str | None,
) -> tuple[Conversation, dict[str, Any]]:
    """The prompt, and a report of its order for the client.

    The order is chosen by what is cached now, under the request's salt; the parts stay as given if
    no order is cached better.
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
