"""Moves the lines of a system text that change with every call behind the rest of it.

Agents put request ids, dates and checksums before everything else; an exact prefix then ends in the
first line of every prompt. The operator declares such lines (--volatile-head), a request asks for
the move (move_volatile_head), and its answer says which lines were moved.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvweave.errors import RequestError
from kvweave.server.prompts import ChatPrompt

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
