"""Puts parts of a message, as far as the client left that open, into the order that is cached best.

Whatever the order, the model reads what it would read had the client sent it so. The pieces serve
to find the order; the prompt is written and tokenised as a whole, as always.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvweave.errors import RequestError
from kvweave.kv.pool import IntArray
from kvweave.reorder import Pieces, Proposal, confirmed, propose, tokens_within
from kvweave.server.prompts import Conversation, PromptReader
from kvweave.server.protocol import PART_END, ChatBody, ChatMessage, Reorder
from kvweave.server.service import ServingEngine

if TYPE_CHECKING:
    from kvweave.engine.engine import Engine


async def ordered(
    reader: PromptReader,
    engine: ServingEngine,
    body: ChatBody,
    reorder: Reorder,
    tools: Sequence[dict[str, Any]] | None,
) -> tuple[Conversation, dict[str, Any]]:
    """The prompt, and what the client is told about its order.

    The order is chosen for what is cached now, under the request's salt; the parts stay as given
    where no order is cached better.
    """
    frame, options = _Frame(body.messages, reorder), body.chat_template_kwargs
    prompt = await reader.conversation(body.messages, tools, options)
    given = _array(prompt.ids)
    marked = reader.render(frame.around(frame.mark), tools, options or {})
    pieces = await asyncio.to_thread(frame.pieces, marked, reader.encode_plain)

    def search(engine: Engine) -> Proposal:
        known = engine.prefixes(body.cache_salt)
        proposal = propose(pieces, known)
        return proposal if proposal.gain else confirmed(known, proposal, given, given)

    proposal = await engine.run_on_engine_thread(search)
    if proposal.gain:
        proposed = await reader.conversation(frame.in_order(proposal.order), tools, options)
        whole, promised = _array(proposed.ids), proposal

        def confirm(engine: Engine) -> Proposal:
            return confirmed(engine.prefixes(body.cache_salt), promised, given, whole)

        proposal = await engine.run_on_engine_thread(confirm)
        prompt = proposed if proposal.gain else prompt
    return prompt, frame.report(proposal)


class _Frame:
    """A conversation around the parts that may move."""

    def __init__(self, messages: Sequence[ChatMessage], reorder: Reorder) -> None:
        self.mark = f"parts{uuid.uuid4().hex}"
        """Stands for all movable parts, and occurs nowhere else."""
        self._at = reorder.place(messages)
        self._messages = messages
        self._first, end = min(reorder.parts), max(reorder.parts) + 1
        content = messages[self._at].content
        assert isinstance(content, tuple)  # else refused
        self._before, self._after = content[: self._first], content[end:]
        self._movable = content[self._first : end]

    def around(self, *parts: str) -> list[ChatMessage]:
        """The conversation with `parts` in place of the movable ones."""
        content = (*self._before, *parts, *self._after)
        message = self._messages[self._at].model_copy(update={"content": content})
        return [*self._messages[: self._at], message, *self._messages[self._at + 1 :]]

    def in_order(self, order: Sequence[int]) -> list[ChatMessage]:
        """The conversation with its movable parts in another order."""
        return self.around(*(self._movable[at] for at in order))

    def pieces(self, marked: str, encode: Callable[[str], Sequence[int]]) -> Pieces:
        """The tokens of a rendered conversation with the mark, and of what the mark stands for.

        Every piece has the line's end after it, as if it were never the last part. RequestError
        where the model's chat template does not leave the mark as it is.
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
        """For the client: the order that was used, and what it was chosen for."""
        return {
            "message": self._at,
            "parts": [self._first + at for at in proposal.order],
            "cached_tokens": proposal.exact,
            "cached_tokens_as_given": proposal.exact_as_given,
        }


def _array(tokens: Sequence[int]) -> IntArray:
    return np.array(tokens, np.int32)
