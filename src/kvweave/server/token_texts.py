"""Single tokens as text and bytes, for log probabilities.

A token may be half a character; its bytes are exact, its text then reads `bytes:\\xe2\\x82`, as
OpenAI's completions have it, so that two such tokens stay two keys.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

_SPIECE_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: GPT-2's encoder.py, inverted.

    Printable bytes stand for themselves; the others are numbered from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


class TokenTexts:
    """Text and bytes per token id, remembered. `tokenizer` is a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._alphabet = _byte_level_alphabet() if _is_byte_level(tokenizer) else None
        self.of = lru_cache(maxsize=65536)(self._of)
        """of(token_id) -> (text, its bytes)."""

    def width(self, token_id: int, shows_special: bool) -> int:
        """Characters that begin in this token, which is where the next one's text begins."""
        if token_id in self._special and not shows_special:
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self.of(token_id)[1])

    def _of(self, token_id: int) -> tuple[str, bytes]:
        raw = self._bytes(token_id)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # the vocabulary is smaller than the model's output
            return b""
        if token_id in self._special:
            return str(token).encode()
        if self._alphabet is not None:
            if all(letter in self._alphabet for letter in token):
                return bytes(self._alphabet[letter] for letter in token)
            return str(token).encode()  # an added token, written as it is
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return str(token).replace(_SPIECE_SPACE, " ").encode()


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether one token of every byte exists in GPT-2's spelling; a space is then 'Ġ'."""
    vocabulary = tokenizer.get_vocab()
    return "\u0120" in vocabulary and _SPIECE_SPACE not in vocabulary


def finite(logprob: float | None) -> float | None:
    """A log probability that JSON can hold: minus infinity becomes -9999, as elsewhere."""
    return None if logprob is None else max(logprob, -9999.0)
