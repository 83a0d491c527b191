"""Numbers, whatever way they are written: 1,000 is 1000, one thousand and 1e3.

A numeral is a decimal string. Trailing zeros stay as long as nothing says that they do not matter:
Python 3.10 is not Python 3.1, while $1.50 and 1.50 kg are $1.5 and 1.5 kg. Leading zeros make an
identifier: order 0123 is not order 123.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from kvweave.fuzzy.facts.wordlists import words

_AS_IT_IS = re.compile(r"(?:0|[1-9]\d*)(?:\.\d+)?")
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
_SCIENTIFIC = re.compile(r"[1-9]\d*(?:\.\d+)?[eE][+-]?\d{1,2}")

_ONES = {
    word: value
    for value, word in enumerate(
        """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
        fifteen sixteen seventeen eighteen nineteen""".split()  # noqa: SIM905
    )
}
_TENS = {
    word: 10 * value
    for value, word in enumerate(
        "twenty thirty forty fifty sixty seventy eighty ninety".split(),  # noqa: SIM905
        2,
    )
}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
ORDINALS = {
    word: str(value)
    for value, word in enumerate(
        """first second third fourth fifth sixth seventh eighth ninth tenth eleventh
        twelfth""".split(),  # noqa: SIM905
        1,
    )
}
_PARTS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "eighth": 8, "tenth": 10}
_MANY_PARTS = {"halves": 2} | {f"{part}s": count for part, count in _PARTS.items()}
BEGINS = words("a minus negative") | _ONES.keys() | _TENS.keys() | ORDINALS.keys()
"""Words that a number may begin with."""


def numeral(written: str) -> str | None:
    """The numeral of digits as they are written, or None if they are something else."""
    if _AS_IT_IS.fullmatch(written):
        return written
    if _GROUPED.fullmatch(written):
        return written.replace(",", "")
    if _SCIENTIFIC.fullmatch(written):
        return plain(written)
    return None


def plain(number: str) -> str:
    """A number without exponent and trailing zeros."""
    text = f"{Decimal(number):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def scaled(number: str, scale: str) -> str | None:
    """`number` times a power of ten by name, as in 2.5 million; None if it is no such name."""
    if scale == "hundred":
        return plain(str(Decimal(number) * 100))
    return plain(str(Decimal(number) * _SCALES[scale])) if scale in _SCALES else None


def fraction(said: Sequence[str]) -> str | None:
    """Two words that are a fraction: three quarters is 3/4."""
    if len(said) < 2 or said[0] not in _ONES:
        return None
    top = _ONES[said[0]]
    parts = _PARTS.get(said[1]) if top == 1 else _MANY_PARTS.get(said[1])
    return f"{top}/{parts}" if top and parts else None


def spoken(said: Sequence[str]) -> tuple[int, int] | None:
    """The number that words begin with, as (value, words it takes); None if they do not.

    "two thousand and five" takes four words; "two four" are two numbers, the first takes one.
    """
    total, at, smallest = 0, 0, 10**15
    while group := _below_thousand(said[at:]):
        value, taken = group
        scale = _SCALES.get(said[at + taken], 1) if at + taken < len(said) else 1
        if scale >= smallest:
            break
        total, at, smallest = total + value * scale, at + taken + (scale > 1), scale
        if scale == 1:
            break
        if said[at : at + 1] == ["and"] and (rest := _rest(said[at + 1 :])):
            return total + rest[0], at + 1 + rest[1]
    return (total, at) if at else None


def _below_thousand(said: Sequence[str]) -> tuple[int, int] | None:
    found = _below_hundred(said)
    if not found and said[:1] == ["a"] and said[1:2] and said[1] in ("hundred", *_SCALES):
        found = 1, 1
    if not found or said[found[1] : found[1] + 1] != ["hundred"]:
        return found
    value, taken = 100 * found[0], found[1] + 1
    linked = taken + (said[taken : taken + 1] == ["and"])
    rest = _rest(said[linked:]) if linked > taken else _below_hundred(said[taken:])
    return (value + rest[0], linked + rest[1]) if rest else (value, taken)


def _rest(said: Sequence[str]) -> tuple[int, int] | None:
    """What follows "hundred and": below a hundred, and not another number's beginning."""
    found = _below_hundred(said)
    if found and said[found[1] : found[1] + 1] and said[found[1]] in ("hundred", *_SCALES):
        return None
    return found


def _below_hundred(said: Sequence[str]) -> tuple[int, int] | None:
    if not said:
        return None
    if said[0] in _ONES:
        return _ONES[said[0]], 1
    if said[0] in _TENS:
        ones = _ONES.get(said[1], 0) if len(said) > 1 else 0
        return (_TENS[said[0]] + ones, 2) if 0 < ones < 10 else (_TENS[said[0]], 1)
    return None
