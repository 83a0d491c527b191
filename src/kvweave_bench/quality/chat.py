"""Conversations as token ids, framed by the model's own chat template.

Contents are tokenised apart from the frame, so that a text has the same tokens in every prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvweave.kv.pool import IntArray


class Chat:
    """Builds prompts for one model."""

    def __init__(self, tokenizer: Any, tokens: Callable[[str], IntArray]) -> None:
        self.tokens = tokens
        self._tokenizer = tokenizer
        self._frames: dict[tuple[str, ...], list[IntArray]] = {}

    def prompt(self, *messages: tuple[str, IntArray]) -> IntArray:
        """(role, content) pairs up to where the assistant begins to answer. int32."""
        roles = tuple(role for role, _ in messages)
        frame = self._frames.get(roles)
        if frame is None:
            frame = self._frames[roles] = [self.tokens(part) for part in self._frame(roles)]
        parts = [frame[0]]
        for (_, content), after in zip(messages, frame[1:], strict=True):
            parts += [content, after]
        return np.concatenate(parts)

    def last_turn(self, *messages: tuple[str, IntArray]) -> int:
        """The position in `prompt(*messages)` from which on its last message may have begun."""
        before, after = self._frames[tuple(role for role, _ in messages)][-2:]
        return len(self.prompt(*messages)) - len(after) - len(messages[-1][1]) - len(before)

    def _frame(self, roles: Sequence[str]) -> list[str]:
        """What stands before, between and after the contents: one more than there are roles."""
        marks = [f"content{number:04}mark" for number in range(len(roles))]
        messages = [
            {"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)
        ]
        if self._tokenizer.chat_template:
            try:
                text = self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            except Exception:  # templates refuse roles and orders with exceptions of their own
                text = ""
            found = re.split("|".join(marks), text)
            if len(found) == len(marks) + 1:
                return found
        # Base models, and templates that cannot tell such a conversation.
        said = "".join(f"{each['role'].title()}: {each['content']}\n\n" for each in messages)
        return re.split("|".join(marks), f"{said}Assistant:")
