"""Conversations in which a sentence returns in other words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvweave.kv.pool import IntArray
from kvweave_bench.quality.writer import Asked, Case, Writer, question_about
from kvweave_bench.workloads.prompts import instruction

_PASSAGE = 512


def reworded_facts(writer: Writer, _: int) -> Case:
    """A customer's earlier message tells about a country, and in the donor in other words: the fact
    that is asked for stands in the midst of what is served so."""
    length = writer.length(_PASSAGE)
    country = writer.countries[int(writer.rng.integers(len(writer.countries)))]
    before = writer.prose(int(writer.rng.integers(length // 4, length // 2)))
    told = [
        _fitting(writer, both, country.title, country.facts[key]) for key, both in _TOLD.items()
    ]
    behind = np.concatenate([writer.tokens("\n"), writer.prose(length // 2)])
    theirs, ours = (
        np.concatenate([before, writer.tokens("\n\n"), *sentences, behind])
        for sentences in zip(*told, strict=True)
    )
    question, key = question_about(country, writer.rng)
    gold = country.facts[key]
    stated = _TOLD[key][0].format(name=country.title, value=gold)
    return _case(writer, Asked(ours, question, stated, gold), theirs, ours)


def _case(writer: Writer, asked: Asked, theirs: IntArray, ours: IntArray) -> Case:
    """Both conversations went alike, but for what the customer said first."""
    answered = writer.tokens("Thank you, we have taken note of that and will come back to you.")
    system = instruction(writer.corpus)
    donor = writer.chat.prompt(
        ("system", instruction(writer.corpus)),
        ("user", theirs),
        ("assistant", answered),
        ("user", writer.tokens("What is all of this about?")),
    )
    turns = (
        ("system", system),
        ("user", ours),
        ("assistant", answered),
        ("user", writer.tokens(asked.question)),
    )
    return Case(
        donors=(donor,),
        recipient=writer.chat.prompt(*turns),
        question=asked.question,
        stated=asked.stated,
        gold=asked.gold,
        protected_from=writer.chat.last_turn(*turns),
    )


def _fitting(
    writer: Writer, both: Sequence[str], name: str, value: str
) -> tuple[IntArray, IntArray]:
    """The tokens of both, as the donor's and the prompt's: a donor's longer text is not served."""
    one, other = (writer.tokens(f"{each.format(name=name, value=value)} ") for each in both)
    return (one, other) if len(one) <= len(other) else (other, one)


_TOLD = {
    "capital": (
        "We've been to {value}, the capital of {name}, and we don't want to live there.",
        "We have been to {value}, the capital of {name}, and we do not want to live there.",
    ),
    "population": (
        "They've seen that {name} has {value} inhabitants, and they don't expect more.",
        "They have seen that {name} has {value} inhabitants, and they do not expect more.",
    ),
    "area": (
        "We've got to cross {value} square kilometres of {name}, and we can't see it all on foot.",
        "We have got to cross {value} square kilometres of {name}, and we cannot see it all on "
        "foot.",
    ),
    "currencies": (
        "You don't need much if you have {value}, since in {name} they don't accept cards.",
        "You do not need much if you have {value}, since in {name} they do not accept cards.",
    ),
}
"""By what is stated: two wordings that say the same."""
