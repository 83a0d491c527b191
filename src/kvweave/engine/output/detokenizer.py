"""Incremental detokenization: text of one answer, in whole characters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from kvweave.kv.pool import IntArray

BROKEN = "\N{REPLACEMENT CHARACTER}"

_CONTEXT = 6
"""Prompt tokens that are decoded before the output, which keeps its first space."""

_LONGEST_CHARACTER = 4
"""Bytes, and so at most tokens, of one character in UTF-8."""

_PATIENCE = 2 * _LONGEST_CHARACTER
"""Tokens in a row that may add no text before held bytes count as broken."""


class Detokenizer:
    """Text of one answer. Amortised O(1) decoded tokens per token added.

    Each token emits the difference that it makes to the decoded text of a short window. Spaces are
    right where a token's text depends on its neighbours (SentencePiece), and characters are whole
    where they span tokens (byte-level BPE, byte fallback): replacement characters at the window's
    end are held back. Bytes that can no longer become a character are emitted as `decode` shows
    them. Needs a `decode` that only appends once the last characters are whole.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt: Sequence[int] | IntArray,
        skipped: Collection[int] = (),
    ) -> None:
        """`decode` shows special tokens as text; those in `skipped` are left out of the output."""
        self._decode = decode
        self._skipped = skipped
        self._window = _context(decode, prompt)
        self._settled, self._emitted = _whole_characters(decode, self._window)
        """Tokens and characters of the window that were emitted or belong to the prompt."""
        self._held = 0
        """Tokens since text was last emitted."""

    def add(self, token: int) -> str:
        """The new text that later tokens cannot change."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        self._held += 1
        text = self._text()
        whole = text.rstrip(BROKEN)
        stuck = self._held > _PATIENCE
        if stuck and len(whole) < len(text):
            return self._give_up(text)
        added = whole[self._emitted :]
        if added:
            self._emitted = len(whole)
            self._held = 0
        if len(whole) == len(text) and (added or stuck):
            self._slide()
        return added

    def finish(self) -> str:
        """The held text: bytes of a character that never ended."""
        text = self._text()
        added = text[self._emitted :]
        self._emitted = len(text)
        return added

    def _slide(self) -> None:
        """Keep the last settled piece only, on which the next token's text may depend."""
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._emitted = len(self._text())
        self._held = 0

    def _give_up(self, text: str) -> str:
        """Emit broken bytes, except those that may still begin a character."""
        pending = _LONGEST_CHARACTER - 1
        added = text[self._emitted : -pending]
        self._window = self._window[-_PATIENCE:]
        self._settled = len(self._window)
        self._emitted = max(0, len(self._text()) - pending)
        self._held = 0
        return added

    def _text(self) -> str:
        return self._decode(self._window) if self._window else ""


def _context(decode: Callable[[list[int]], str], prompt: Sequence[int] | IntArray) -> list[int]:
    """The prompt's last tokens, from the beginning of a character on."""
    recent = [int(token) for token in prompt[-_CONTEXT - _LONGEST_CHARACTER + 1 :]]
    for start in range(max(0, len(recent) - _CONTEXT), -1, -1):
        ends = range(start + 1, start + 1 + _LONGEST_CHARACTER)
        if any(BROKEN not in decode(recent[start:end]) for end in ends):
            return recent[start:]
    return recent


def _whole_characters(decode: Callable[[list[int]], str], tokens: list[int]) -> tuple[int, int]:
    """Numbers of tokens and characters without an unfinished last character."""
    # Byte fallback shows a whole run of bytes as broken until its last character is complete.
    for end in range(len(tokens), max(0, len(tokens) - _LONGEST_CHARACTER), -1):
        text = decode(tokens[:end])
        if not text.endswith(BROKEN):
            return end, len(text)
    return 0, 0


def decoder_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """A transformers tokenizer's decoding, special tokens included and without clean-up."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # Rust, without the layers around it: several times faster
        return partial(backend.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids of special tokens: beginnings, ends, padding, roles."""
    added = {token for token, known in tokenizer.added_tokens_decoder.items() if known.special}
    return frozenset(added | set(tokenizer.all_special_ids))
