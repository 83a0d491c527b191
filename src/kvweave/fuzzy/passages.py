"""Where sentences begin and end in tokens: the pieces in which meaning is compared."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvweave.kv.pool import IntArray

Decode = Callable[[IntArray], str]
"""Token ids (int32) to text, special tokens spelled out."""

LONGEST = 128
"""Tokens of a passage; what goes on without an end is none."""

_KNOWN, _ENDS, _BREAKS, _DIGIT = 1, 2, 4, 8
"""What a token does to a sentence. A line's end breaks and ends it; a special token breaks only."""
_SENTENCE_END = re.compile(r"[.!?\u2026\u3002\uff01\uff1f][\"'\u2019\u201d)\]]*\s*$")
_SPECIAL = re.compile(r"\s*<\S*>\s*$")


class Passage(NamedTuple):
    """Tokens `start` to `end`: a sentence, or a line."""

    start: int
    end: int


class Cutter:
    """Cuts tokens into passages; what each token does to a sentence is found out once.

    A passage ends with a full stop, question or exclamation mark that no digit follows, with a
    line, and before and after a special token. Texts of two prompts are cut alike wherever their
    tokens are alike.
    """

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._flags = np.zeros(0, np.uint8)

    def cut(self, tokens: IntArray, offset: int = 0) -> list[Passage]:
        """All passages of `tokens`, whose first one has position `offset`; the last may be part of
        a longer one."""
        ends = np.flatnonzero(self._ends(tokens)) + 1
        edges = [0, *ends.tolist()]
        if edges[-1] < len(tokens):
            edges.append(len(tokens))
        return [Passage(offset + start, offset + end) for start, end in pairwise(edges)]

    def around(self, tokens: IntArray, start: int, end: int) -> Passage:
        """The least run of whole passages that holds `start` to `end`, as far as `tokens` go."""
        first = max(0, start - LONGEST)
        ends = np.flatnonzero(self._ends(tokens[first : end + LONGEST])) + first + 1
        before, behind = ends[ends <= start], ends[ends >= end]
        return Passage(
            int(before[-1]) if len(before) else first,
            int(behind[0]) if len(behind) else min(len(tokens), end + LONGEST),
        )

    def text(self, tokens: IntArray) -> str:
        """What a passage says, without the white space around it."""
        return self.decode(tokens).strip()

    def _ends(self, tokens: IntArray) -> npt.NDArray[np.bool_]:
        """Which tokens are the last ones of their passage."""
        flags = self._of(tokens)
        following = np.append(flags[1:], np.uint8(0))
        sentence = (flags & _ENDS != 0) & (following & _DIGIT == 0)
        special = following & (_BREAKS | _ENDS) == _BREAKS
        ends: npt.NDArray[np.bool_] = sentence | (flags & _BREAKS != 0) | special
        return ends

    def _of(self, tokens: IntArray) -> npt.NDArray[np.uint8]:
        if len(tokens) and int(tokens.max()) >= len(self._flags):
            grown = np.zeros(2 * int(tokens.max()) + 1, np.uint8)
            grown[: len(self._flags)] = self._flags
            self._flags = grown
        for token in np.unique(tokens[self._flags[tokens] == 0]).tolist():
            self._flags[token] = _KNOWN | _kind(self.decode(np.array([token], np.int32)))
        return self._flags[tokens]


def _kind(text: str) -> int:
    if _SPECIAL.match(text):
        return _BREAKS
    kind = _ENDS if _SENTENCE_END.search(text) else 0
    if "\n" in text:
        kind |= _BREAKS | _ENDS
    return kind | (_DIGIT if text[:1].isdigit() else 0)
