"""Tokens that are one fact become one: sign, currency, digits, scale and unit; day, month, year."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from kvweave.fuzzy.facts.base import Token
from kvweave.fuzzy.facts.notation import clock
from kvweave.fuzzy.facts.numerals import BEGINS, ORDINALS, fraction, plain, scaled, spoken
from kvweave.fuzzy.facts.units import UNITS
from kvweave.fuzzy.facts.wordlists import table, words

_Found: TypeAlias = "tuple[Token, int] | None"
"""A fact, and the index behind the last token that it is made of."""

_MONTHS = table("""
01: january, jan
02: february, feb
03: march, mar
04: april, apr
05: May
06: june, jun
07: july, jul
08: august, aug
09: september, sept, sep
10: october, oct
11: november, nov
12: december, dec
""")
_DAY = re.compile(r"[1-9]|[12]\d|3[01]")
_YEAR = re.compile(r"[12]\d{3}")
_THOUSANDS = re.compile(r"[1-9]\d{0,2}\.\d{3}")
"""May be thousands in some countries, and thousandths in others: kept as it stands."""
_MILLIONS = re.compile(r"(\d+(?:\.\d+)?)[mM]")
_NUMERIC = words("numeral currency sign ordinal time")
_MAY_BEGIN = BEGINS | _MONTHS.keys() | words("noon midday midnight")


def compose(tokens: Sequence[Token]) -> list[Token]:
    """The same text with every number, date and time as one token."""
    said = [token.value if token.is_word else "" for token in tokens]
    found: list[Token] = []
    at = 0
    while at < len(tokens):
        if tokens[at].kind in _NUMERIC or said[at] in _MAY_BEGIN:
            composed = (
                _date(tokens, said, at) or _time(tokens, said, at) or _number(tokens, said, at)
            )
            if composed:
                fact, at = composed
                found.append(fact)
                continue
        found.append(tokens[at])
        at += 1
    return found


def _number(tokens: Sequence[Token], said: Sequence[str], at: int) -> _Found:
    sign = currency = ""
    while at < len(tokens):
        if tokens[at].kind == "sign":
            sign += tokens[at].value
        elif said[at] in ("minus", "negative"):
            sign += "-"
        elif tokens[at].kind == "currency":
            currency = tokens[at].value
        else:
            break
        at += 1
    if at == len(tokens):
        return None
    if said[at] in ORDINALS:
        return None if sign or currency else (Token("ordinal", ORDINALS[said[at]]), at + 1)
    amount = _amount(tokens, said, at, bool(currency))
    if not amount:
        return None
    number, rounded, at = amount
    unit, at = (currency, at) if currency else _unit(tokens, said, at)
    if (unit or rounded) and "/" not in number and not _THOUSANDS.fullmatch(number):
        number = plain(number)
    return Token("number", f"{sign}{number} {unit}".rstrip()), at


def _amount(
    tokens: Sequence[Token], said: Sequence[str], at: int, is_money: bool
) -> tuple[str, bool, int] | None:
    """The number at `at`, whether its trailing zeros say nothing, and the index behind it."""
    if part := fraction(said[at : at + 2]):
        return part, False, at + 2
    if tokens[at].kind == "numeral":
        number, rounded, at = tokens[at].value, False, at + 1
    elif is_money and (millions := _MILLIONS.fullmatch(tokens[at].value)):
        return scaled(millions[1], "million") or "", True, at + 1
    elif value := spoken(said[at : at + 16]):
        number, rounded, at = str(value[0]), True, at + value[1]
    else:
        return None
    if at < len(tokens) and (times := scaled(number, said[at])):
        return times, True, at + 1
    return number, rounded, at


def _unit(tokens: Sequence[Token], said: Sequence[str], at: int) -> tuple[str, int]:
    """The unit at `at`, if there is one, and the index behind it."""
    if at == len(tokens):
        return "", at
    token = tokens[at]
    if token.kind == "unit":
        return token.value, at + 1
    if token.value == "\u00b0" or said[at] in ("degree", "degrees"):
        scale = UNITS.get(said[at + 1] if at + 1 < len(tokens) else "", "")
        return (scale, at + 2) if scale in ("celsius", "fahrenheit") else ("degree", at + 1)
    if said[at : at + 2] == ["per", "cent"]:
        return "percent", at + 2
    if token.value in UNITS and (token.is_word or token.value == "%"):
        return UNITS[token.value], at + 1
    return "", at


def _time(tokens: Sequence[Token], said: Sequence[str], at: int) -> _Found:
    token = tokens[at]
    half = said[at + 1].lower() if at + 1 < len(tokens) else ""
    if token.kind == "time":
        written = token.value.removesuffix(" (am or pm)")
        if half in ("am", "pm") and written != token.value:
            hour, minute = written.split(":", 1)
            return Token("time", clock(hour, minute, half)), at + 2
        return token, at + 1
    is_hour = token.kind == "numeral" and _DAY.fullmatch(token.value) and int(token.value) <= 12
    if is_hour and half in ("am", "pm"):
        return Token("time", clock(token.value, "00", half)), at + 2
    if said[at] in ("noon", "midday"):
        return Token("time", "12:00"), at + 1
    return (Token("time", "00:00"), at + 1) if said[at] == "midnight" else None


def _date(tokens: Sequence[Token], said: Sequence[str], at: int) -> _Found:
    """March 1st, 2024 and 1 March 2024, with and without a year, and March 2024.

    A month alone stays a word.
    """
    if month := _MONTHS.get(said[at]):
        day, end = _day(tokens, said, at + 1), at + 2
        if not day:
            year, end = _year(tokens, at + 1)
            return (Token("date", f"{year}-{month}"), end) if year else None
    else:
        day = _day(tokens, said, at)
        end = at + 1 + (said[at + 1 : at + 2] == ["of"])
        month = _MONTHS.get(said[end]) if end < len(tokens) else None
        if not day or not month:
            return None
        end += 1
    year, end = _year(tokens, end)
    return Token("date", f"{year or '-'}-{month}-{day:02}"), end


def _day(tokens: Sequence[Token], said: Sequence[str], at: int) -> int | None:
    if at >= len(tokens):
        return None
    written = ORDINALS.get(said[at])
    if tokens[at].kind in ("numeral", "ordinal"):
        written = tokens[at].value
    return int(written) if written and _DAY.fullmatch(written) else None


def _year(tokens: Sequence[Token], at: int) -> tuple[str, int]:
    """A year of four digits, a comma before it or not, and the index behind it."""
    behind = at + 1 if at < len(tokens) and tokens[at].kind == "comma" else at
    if behind < len(tokens) and tokens[behind].kind == "numeral":
        year = tokens[behind].value
        if _YEAR.fullmatch(year):
            return year, behind + 1
    return "", at
