"""Tokens to text, one at a time, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from kvweave.kv.pool import IntArray

BROKEN = "\N{REPLACEMENT CHARACTER}"

_CONTEXT = 6
"""Prompt tokens that are decoded along, so that the output's first space survives."""

_LONGEST_CHARACTER = 4
"""Bytes, and so at most tokens, of one character in UTF-8."""

_PATIENCE = 2 * _LONGEST_CHARACTER
"""Tokens in a row that may add no text before what is held back counts as broken."""


class Detokenizer:
    """Text of one answer. Amortised O(1) decoded tokens per token added.

    Works with any tokenizer whose `decode` only ever adds to its text once the last characters are
    whole: what is emitted is the difference that a token makes to the text of a short window. So
    spaces are right where a token's text depends on its neighbours (SentencePiece), and characters
    whole where they spread over tokens (byte-level BPE, byte fallback): while the window ends in
    replacement characters, those are held back. Bytes that can no longer become a character are
    emitted as replacement characters, as `decode` shows them.
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
        """Of the window, tokens and characters that were emitted, or belong to the prompt."""
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
        """What was held back: bytes of a character that never got its end."""
        text = self._text()
        added = text[self._emitted :]
        self._emitted = len(text)
        return added

    def _slide(self) -> None:
        """Drop all but the last settled piece, on which the next token's text may depend."""
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._emitted = len(self._text())
        self._held = 0

    def _give_up(self, text: str) -> str:
        """Emit broken bytes as such, but for those that may still be the start of a character."""
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
    """How many tokens, and characters, there are without a last one that has only begun."""
    # Byte fallback shows a whole run of bytes as broken while its last character is incomplete.
    for end in range(len(tokens), max(0, len(tokens) - _LONGEST_CHARACTER), -1):
        text = decode(tokens[:end])
        if not text.endswith(BROKEN):
            return end, len(text)
    return 0, 0


def decoder_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """The decoding of a transformers tokenizer that shows every token and changes nothing."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # Rust, without the layers around it: several times faster
        return partial(backend.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids that are no text: beginnings, ends, padding, roles."""
    added = {token for token, known in tokenizer.added_tokens_decoder.items() if known.special}
    return frozenset(added | set(tokenizer.all_special_ids))
