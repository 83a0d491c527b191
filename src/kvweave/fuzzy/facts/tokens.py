"""From text to tokens: words, numerals, identifiers, symbols and ends of sentences."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from kvweave.fuzzy.facts.base import Token
from kvweave.fuzzy.facts.notation import ABBREVIATION, blob_tokens, word_tokens
from kvweave.fuzzy.facts.units import CURRENCY_SIGNS
from kvweave.fuzzy.facts.wordlists import words

_CHUNK = re.compile(r"\S+|\n(?=[ \t]*(?:\n|[-*\u2022] |\d+[.)] ))")
"""What stands between two spaces, or a line's end where a list or paragraph begins."""
_PIECE = re.compile(
    r"""
    (?P<identifier>
        (?:[A-Za-z][\w+.-]*://|www\.)\S*[\w/=&\#-]
      | [\w.+-]*@[\w-]+(?:\.[\w-]+)*
      | (?:[A-Za-z]:|[.~]{1,2})?[/\\][\w.-]*\w(?:[/\\][\w.-]*\w)*
      | \w+(?:\\\w+)+
    )
  | (?P<currency>(?:US|AU?|CA?|NZ|HK)?\$|[\u00a3\u20ac\u00a5\u20b9])
  | (?P<blob>\w(?:
        \w
      | [-./&'\u2019\u2013](?=\w)
      | (?<=\d),(?=\d{3}(?!\d))
      | (?<=\d):(?=\d)
      | [\u0300-\u036f\u200d]
    )*)
  | (?P<symbol><=|>=|!=|==|=>|->|\.{2,}|--|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_ENDS = frozenset(".!?;\u2026\u3002\uff01\uff1f\uff1b\u0964\u061f")
_ASKING = frozenset("?\uff1f\u061f")
_COMMAS = frozenset(",\uff0c\u3001\u060c")
_APOSTROPHES = frozenset("'\u2019")
_QUOTES = frozenset("\"'`\u2018\u2019\u201c\u201d\u201e\u00ab\u00bb")
_MINUS = frozenset("-\u2212\u2013")
_LONG_DASHES = frozenset(("\u2014", "\u2013", "--"))
_SAME_SYMBOL = {"\u2264": "<=", "\u2265": ">=", "\u2260": "!=", "\u2248": "~", "\u00d7": "*",
                "\u00f7": "/"}  # fmt: skip
_TITLES = words("mr mrs ms dr prof st jr sr vs no approx dept inc ltd etc fig")
_END, _QUESTION_MARK = Token("end", "."), Token("end", "?")
_COMMA, _DASH = Token("comma", ","), Token("comma", "-")


def tokens_of(text: str) -> list[Token]:
    """All tokens of a text, in order. Nothing is left out but spaces."""
    found: list[Token] = []
    for chunk in _CHUNK.findall(unicodedata.normalize("NFC", text)):
        found += _chunk_tokens(chunk)
    return found


@lru_cache(maxsize=32_768)
def _chunk_tokens(chunk: str) -> tuple[Token, ...]:
    """The tokens of one chunk; texts repeat themselves, so it is remembered."""
    if chunk.isascii() and chunk.isalpha():
        return word_tokens(chunk)
    if chunk == "\n":
        return (_END,)
    found: list[Token] = []
    at = 0
    while match := _PIECE.match(chunk, at):
        piece, kind, at = match.group(), match.lastgroup, match.end()
        if kind == "identifier":
            found.append(Token("identifier", piece))
        elif kind == "currency":
            found.append(Token("currency", CURRENCY_SIGNS[piece]))
        elif kind == "symbol":
            found.append(_symbol(piece, chunk[: match.start()], chunk[at : at + 1]))
        elif ABBREVIATION.fullmatch(piece):
            # The full stop of U.S. or a.m. ends no sentence.
            at += chunk.startswith(".", at)
            found += word_tokens(piece.replace(".", ""))
        elif piece.lower() in _TITLES and chunk[at:] == ".":
            at += 1
            found.append(Token("word", piece.lower()))
        else:
            found += blob_tokens(piece)
    return tuple(found)


def _symbol(piece: str, before: str, after: str) -> Token:
    """One symbol, by what stands around it: a sign, a dash between phrases, an apostrophe."""
    if piece in _COMMAS or piece in _LONG_DASHES:
        if before[-1:].isdigit() and after.isdigit():
            return Token("symbol", "," if piece in _COMMAS else "-")  # 1,5 and 1, 5 are not one
        return _COMMA if piece in _COMMAS else _DASH
    if piece[0] in _ENDS:
        return _QUESTION_MARK if piece in _ASKING else _END
    begins = not before or not (before[-1].isalnum() or before[-1] in ")]")
    if begins and (after.isdigit() or after in CURRENCY_SIGNS):
        if piece in _MINUS:
            return Token("sign", "-")
        if piece == "+":
            return Token("sign", "+")
    if piece in _APOSTROPHES and before[-1:] in ("s", "S") and before[0] not in _QUOTES:
        return Token("word", "'s")  # the students' books
    if piece in "([" and not begins:
        return Token("symbol", f"call {piece}")  # f(x) is code, and (x) may be prose
    return Token("symbol", '"' if piece in _QUOTES else _SAME_SYMBOL.get(piece, piece))
