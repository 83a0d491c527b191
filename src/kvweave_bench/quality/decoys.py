"""Near-duplicates: the donor's document differs from the recipient's in one fact.

What is moved then stands behind the recipient's fact, but was computed behind the donor's. A model
that follows it answers with a fact that its own prompt does not state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvweave.kv.pool import IntArray
from kvweave_bench.quality.writer import Case, Writer

_FILLER = 160
_NEAR = 48
"""Tokens behind a fact near the question: enough of them to be moved, which fewer would not be."""


@dataclass(frozen=True, slots=True)
class Value:
    """A fact's content: as it is written, and as an answer would give it."""

    written: str
    answered: str


@dataclass(frozen=True, slots=True)
class Fact:
    """A kind of fact: how it is stated, stated again, asked for; `{}` is where its value goes."""

    kind: str
    statement: str
    restatement: str
    question: str


def near_duplicate(writer: Writer, number: int) -> Case:
    """Case `number` of a series that has every kind of fact in every arrangement equally often.

    The fact is stated once or twice, near the question or far from it, and the donor was asked for
    it too, or for something else.
    """
    arrangement, at = divmod(number, len(FACTS))
    twice, near, same_question = (bool(arrangement >> bit & 1) for bit in range(3))
    fact = FACTS[at]
    values = _VALUES[fact.kind](writer)
    held = [writer.prose(writer.length(_FILLER)), writer.prose(writer.length(_FILLER))]
    last = writer.prose(_NEAR if near else writer.length(_FILLER))
    recipient, donor = (_document(writer, fact, value, twice, held, last) for value in values)
    ours, theirs = values
    return Case(
        donors=(writer.prompt(donor, fact.question if same_question else None),),
        recipient=writer.prompt(recipient, fact.question),
        question=fact.question,
        stated=f"{fact.statement.format(ours.written)} (In the donor: {theirs.written}.)",
        gold=ours.answered,
        decoy=theirs.answered,
    )


def _document(
    writer: Writer, fact: Fact, value: Value, twice: bool, held: list[IntArray], last: IntArray
) -> IntArray:
    """Prose with the fact before its last piece, and before that in the middle if stated twice."""
    first, second = (
        writer.tokens(f"\n\n{sentence.format(value.written)}\n\n")
        for sentence in (fact.statement, fact.restatement)
    )
    if twice:
        return np.concatenate([held[0], first, held[1], second, last])
    return np.concatenate([held[0], held[1], first, last])


def _identifiers(writer: Writer) -> tuple[Value, Value]:
    """Two that differ in one digit, as successive file numbers do."""
    letters = "".join(writer.rng.choice(list("BCDFGHKLMNPRSTVWXZ"), 2))
    number, other = writer.rng.choice(9, 2, replace=False) + 1
    rest = writer.rng.integers(100, 1000)
    return _same(f"{letters}-{number}{rest}"), _same(f"{letters}-{other}{rest}")


def _numbers(writer: Writer) -> tuple[Value, Value]:
    ours, theirs = writer.rng.choice(np.arange(112, 999), 2, replace=False)
    return _same(str(ours)), _same(str(theirs))


def _units(writer: Writer) -> tuple[Value, Value]:
    number = int(writer.rng.integers(12, 99))
    ours, theirs = writer.rng.permutation(("metres", "feet"))
    return _same(f"{number} {ours}"), _same(f"{number} {theirs}")


def _names(writer: Writer) -> tuple[Value, Value]:
    capitals = sorted({country.facts["capital"] for country in writer.countries})
    ours, theirs = writer.rng.choice(capitals, 2, replace=False)
    return _same(str(ours)), _same(str(theirs))


def _dates(writer: Writer) -> tuple[Value, Value]:
    """Two that differ in the month."""
    ours, theirs = writer.rng.choice(_MONTHS, 2, replace=False)
    day, year = writer.rng.integers(1, 29), writer.rng.integers(2027, 2040)
    return _same(f"{day} {ours} {year}"), _same(f"{day} {theirs} {year}")


def _negations(writer: Writer) -> tuple[Value, Value]:
    yes, no = Value("possible", "yes"), Value("not possible", "no")
    return (yes, no) if writer.rng.integers(2) else (no, yes)


def _same(text: str) -> Value:
    return Value(text, text)


FACTS = (
    Fact(
        "identifier",
        "The file number of this matter is {}.",
        "Always quote file number {} when you write to us.",
        "What is the file number of this matter?",
    ),
    Fact(
        "number",
        "At most {} copies may be made of this record.",
        "Whoever needs more than {} copies of this record has to ask.",
        "How many copies may be made of this record?",
    ),
    Fact(
        "unit",
        "The cable for this installation is {} long.",
        "A cable of {} was ordered for this installation.",
        "How long is the cable for this installation?",
    ),
    Fact(
        "name",
        "The office in charge of this matter is the one in {}.",
        "Papers in this matter are sent to the office in {}.",
        "In which city is the office in charge of this matter?",
    ),
    Fact(
        "date",
        "This agreement ends on {}.",
        "Until {} this agreement binds both sides.",
        "On which day does this agreement end?",
    ),
    Fact(
        "negation",
        "A refund after delivery is {}.",
        "Once again, refunds after delivery are {}.",
        "Is a refund after delivery possible? Answer with yes or no.",
    ),
)
_VALUES: dict[str, Callable[[Writer], tuple[Value, Value]]] = {
    "identifier": _identifiers,
    "number": _numbers,
    "unit": _units,
    "name": _names,
    "date": _dates,
    "negation": _negations,
}
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
