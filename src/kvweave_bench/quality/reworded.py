"""Conversations in which a sentence returns in other words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.errors import KvweaveError
from kvweave.fuzzy.facts import differing
from kvweave.fuzzy.matcher import common_suffix
from kvweave.kv.pool import IntArray
from kvweave.prefix.tree import common_prefix
from kvweave_bench.quality.writer import Asked, Case, Writer, question_about
from kvweave_bench.workloads.prompts import instruction

_PASSAGE = 512
SOURCE = "fow-cache"


def reworded(writer: Writer, number: int) -> Case:
    """A customer's earlier message holds a passage and a question; the donor worded that question
    differently. What is asked in the end is a fact of the passage.

    Only pairs of questions that state the same facts, in no more of the donor's tokens than the
    prompt's, and differ in more than a word: of the others, nothing is served in other words, and
    there is nothing to judge.
    """
    pairs = _pairs(writer)
    theirs, ours = pairs[number % len(pairs)]
    length = writer.length(_PASSAGE)
    asked, behind = writer.asked(length), writer.prose(length // 2)
    before = np.concatenate([asked.passage, writer.tokens("\n\n")])
    return _case(writer, asked, *(np.concatenate([before, one, behind]) for one in (theirs, ours)))


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


def _pairs(writer: Writer) -> list[tuple[IntArray, IntArray]]:
    """Pairs that can be served, the donor's wording first."""
    found = []
    for text in writer.corpus.collection(SOURCE).texts:
        both = [_sentence(each) for each in (text.body, text.facts["other"])]
        if differing(*both) is not None:
            continue
        theirs, ours = _shorter_first(writer, both)
        before = common_prefix(ours, theirs)
        differing_tokens = len(theirs) - before - common_suffix(ours[before:], theirs[before:])
        if differing_tokens >= FuzzyConfig().semantic_min_span:
            found.append((theirs, ours))
    if not found:
        raise KvweaveError(f"no pair of {SOURCE} states the same facts")
    return found


def _fitting(
    writer: Writer, both: Sequence[str], name: str, value: str
) -> tuple[IntArray, IntArray]:
    return _shorter_first(writer, [each.format(name=name, value=value) for each in both])


def _shorter_first(writer: Writer, both: Sequence[str]) -> tuple[IntArray, IntArray]:
    """The tokens of both, as the donor's and the prompt's: a donor's longer text is not served."""
    one, other = (writer.tokens(f"{each} ") for each in both)
    return (one, other) if len(one) <= len(other) else (other, one)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}?"


_TOLD = {
    "capital": (
        "A quick taxi through {value}, the capital of {name}, is usually cheap.",
        "A fast cab through {value}, the capital of {name}, is normally inexpensive.",
    ),
    "population": (
        "The whole country of {name} has {value} inhabitants, and almost all have a phone.",
        "The entire country of {name} has {value} inhabitants, and nearly all have a telephone.",
    ),
    "area": (
        "{name} is a big country of {value} square kilometres, which are hard to see in a holiday.",
        "{name} is a large country of {value} square kilometres, which are difficult to see in a "
        "vacation.",
    ),
    "currencies": (
        "Whoever buys a photo in {name} usually pays in {value} at the shop.",
        "Whoever purchases a picture in {name} normally pays in {value} at the store.",
    ),
}
"""By what is stated: two wordings that say the same."""
