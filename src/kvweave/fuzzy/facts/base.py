"""The smallest parts of a text that can be equal or not."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal[
    "word", "name", "number", "ordinal", "date", "time", "identifier", "foreign", "symbol", "comma",
    "end", "numeral", "unit", "currency", "sign",
]  # fmt: skip
"""The last four become parts of numbers; a name is a word that begins with a capital."""


class Token(NamedTuple):
    """`value` is canonical within its kind: two equal tokens mean the same."""

    kind: Kind
    value: str

    @property
    def is_word(self) -> bool:
        return self.kind == "word" or self.kind == "name"
