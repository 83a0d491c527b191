"""What a run of letters, digits and joiners stands for: 5kg, 3:30pm, 2nd, 10-20, a word, an id."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from kvweave.fuzzy.facts.base import Token
from kvweave.fuzzy.facts.numerals import numeral
from kvweave.fuzzy.facts.spelling import written
from kvweave.fuzzy.facts.units import SCALE_SUFFIXES, UNITS

ABBREVIATION = re.compile(r"(?:[A-Za-z]\.)+[A-Za-z]")
_LETTERS = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*")
_NUMBER_WORDS = re.compile(r"(\d+(?:\.\d+)?)((?:-[a-z]+)+)")
_NUMBER_LETTERS = re.compile(r"([\d,.]*\d)([A-Za-z\u00b5\u03bc]+)")
_RANGE = re.compile(r"([\d.,:]+[A-Za-z]*)[-\u2013]([\d.,:]+[A-Za-z]*)")
_CLOCK = re.compile(r"([01]?\d|2[0-3])[:.]([0-5]\d(?::[0-5]\d)?)([ap]m)?", re.IGNORECASE)
_ISO_DATE = re.compile(r"(\d{4})-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])")
_DAY_MONTH_YEAR = re.compile(r"(\d\d?)([/.])(\d\d?)\2(\d{4})")
_FRACTION = re.compile(r"([1-9]\d*)/([1-9]\d*)")
_HOURS = frozenset(str(hour) for hour in range(1, 13))


def word_tokens(word: str) -> tuple[Token, ...]:
    """The words that a run of Latin letters and apostrophes stands for."""
    return tuple(
        Token("identifier" if one.is_opaque else "name" if one.is_name else "word", one.word)
        for one in written(word)
    )


def blob_tokens(blob: str) -> tuple[Token, ...]:
    """Words and numerals if it can be read so, else one identifier that must recur as it is."""
    if len(blob) == 1 and unicodedata.category(blob) == "No":
        return (Token("number", unicodedata.normalize("NFKC", blob).replace("\u2044", "/")),)
    if _LETTERS.fullmatch(blob):
        if not _is_latin(blob):
            return (Token("foreign", blob),)
        if "-" not in blob:
            return word_tokens(blob)
        # billing-eu and shop-api may be somebody's names: their words have no synonyms.
        found = [token for part in blob.split("-") for token in word_tokens(part)]
        return tuple(Token("name", each.value) if each.is_word else each for each in found)
    if (number := numeral(blob)) is not None:
        return (Token("numeral", number),)
    if (match := _CLOCK.fullmatch(blob)) and (":" in blob or match[3]):
        return (Token("time", clock(match[1], match[2], match[3])),)
    if match := _NUMBER_LETTERS.fullmatch(blob):
        return _measured(blob, match[1], match[2])
    if match := _NUMBER_WORDS.fullmatch(blob):
        behind = [token for part in match[2][1:].split("-") for token in word_tokens(part)]
        return (*blob_tokens(match[1]), *behind)
    if _ISO_DATE.fullmatch(blob):
        return (Token("date", blob),)
    if match := _DAY_MONTH_YEAR.fullmatch(blob):
        return (_written_date(blob, int(match[1]), int(match[3]), match[4]),)
    if match := _RANGE.fullmatch(blob):
        first, last = blob_tokens(match[1]), blob_tokens(match[2])
        if all(token.kind != "identifier" for token in first + last):
            return (*first, Token("word", "to"), *last)
    if _FRACTION.fullmatch(blob):
        return (Token("number", blob),)
    parts = blob.split("/")
    if len(parts) > 1 and all(_LETTERS.fullmatch(part) and _is_latin(part) for part in parts):
        first, *others = map(blob_tokens, parts)
        return sum(((Token("symbol", "/"), *other) for other in others), first)
    return (Token("identifier" if blob.isascii() else "foreign", blob),)


def clock(hour: str, minute: str, half: str | None) -> str:
    """A time of day on the 24-hour clock; one that may be in either half of the day says so."""
    hours = int(hour)
    if half and 1 <= hours <= 12:
        hours = hours % 12 + (12 if half.lower() == "pm" else 0)
    elif 1 <= hours <= 12 and not hour.startswith("0"):
        return f"{hours}:{minute} (am or pm)"
    return f"{hours:02}:{minute}"


def _measured(blob: str, digits: str, letters: str) -> tuple[Token, ...]:
    """Digits with letters behind them: 5kg, 3pm, 2nd, 10k; whatever else is an identifier."""
    number, small = numeral(digits), letters.lower()
    if number is None:
        return (Token("identifier", blob),)
    if small in ("am", "pm") and number in _HOURS:
        return (Token("time", clock(number, "00", small)),)
    if small in ("st", "nd", "rd", "th") and digits.isdigit():
        return (Token("ordinal", digits),)
    if letters in UNITS:
        return (Token("numeral", number), Token("unit", UNITS[letters]))
    if letters in SCALE_SUFFIXES:
        return (Token("numeral", number), Token("word", SCALE_SUFFIXES[letters]))
    return (Token("identifier", blob),)


def _written_date(blob: str, first: int, second: int, year: str) -> Token:
    """25/03/2024 can be read in one way only; 05/03/2024 is kept as it stands."""
    if first > 12 >= second:
        first, second = second, first
    elif not second > 12 >= first:
        return Token("identifier", blob)
    return Token("date", f"{year}-{first:02}-{second:02}")


@lru_cache(maxsize=4096)
def _is_latin(word: str) -> bool:
    return word.isascii() or all(
        not char.isalpha() or unicodedata.name(char, "").startswith("LATIN") for char in word
    )
