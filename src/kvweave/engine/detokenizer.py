"""Tokens to text, one at a time, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

BROKEN = "\N{REPLACEMENT CHARACTER}"

_CONTEXT = 6
"""Prompt tokens that are decoded along, so that the output's first space survives."""

_LONGEST_CHARACTER = 4
"""Bytes, and so at most tokens, of one character in UTF-8."""


class Detokenizer:
    """Text of one answer. Amortised O(1) decoded tokens per token added.

    Works with any tokenizer whose `decode` is monotonic once its last characters are whole: only the
    difference that a token makes to the decoded text of a short window is emitted. That keeps
    spaces right where a token's text depends on its neighbours (SentencePiece), and characters
    whole where they spread over tokens (byte-level BPE, byte fallback): while the window ends in
    replacement characters, those are held back. Bytes that can no longer become a character are
    emitted as replacement characters, as `decode` shows them.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt: Sequence[int],
        skipped: Collection[int] = (),
    ) -> None:
        """`decode` shows special tokens as text; those in `skipped` are left out of the output."""
        self._decode = decode
        self._skipped = skipped
        self._window = [int(token) for token in prompt[-_CONTEXT:]]
        self._settled = len(self._window)
        """Window tokens whose text was emitted, or belongs to the prompt."""
        self._emitted = len(self._text().rstrip(BROKEN))
        """Characters of the window's text that were emitted, or belong to the prompt."""
        self._held = 0
        """Tokens since text was last emitted."""

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        self._held += 1
        text = self._text()
        whole = text.rstrip(BROKEN)
        if self._held > 2 * _LONGEST_CHARACTER and len(whole) < len(text):
            whole = text[: 1 - _LONGEST_CHARACTER]  # too old to become a character any more
        added = whole[self._emitted :]
        if not added:
            return ""
        self._emitted = len(whole)
        self._held = 0
        if len(whole) == len(text):
            self._slide()
        return added

    def finish(self) -> str:
        """What was held back: bytes of a character that never got its end."""
        text = self._text()
        added = text[self._emitted :]
        self._emitted = len(text)
        return added

    def _slide(self) -> None:
        """Drop what is settled but for the last piece, which the next token's text may depend on."""
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._emitted = len(self._text())

    def _text(self) -> str:
        return self._decode(self._window) if self._window else ""
