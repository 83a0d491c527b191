"""One sentence of a long conversation in other words: what serving a paraphrase does to answers."""

from __future__ import annotations

import numpy as np

from kvweave.bench.quality.writer import Case, Writer
from kvweave.bench.workloads.prompts import instruction
from kvweave.errors import KvweaveError
from kvweave.fuzzy.donors import common_suffix
from kvweave.fuzzy.facts import differing
from kvweave.fuzzy.paraphrase import LEAST_SAVED
from kvweave.kv.pool import IntArray
from kvweave.prefix.node import common_prefix

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
    system = instruction(writer.corpus)

    def history(question: IntArray) -> list[tuple[str, IntArray]]:
        said = np.concatenate([asked.passage, writer.tokens("\n\n"), question, behind])
        answered = writer.tokens("Thank you, we have taken note of that and will come back to you.")
        return [("user", said), ("assistant", answered)]

    donor = writer.chat.prompt(
        ("system", instruction(writer.corpus)),
        *history(theirs),
        ("user", writer.tokens("What is all of this about?")),
    )
    turns = (("system", system), *history(ours), ("user", writer.tokens(asked.question)))
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
        one, other = (writer.tokens(f"{each} ") for each in both)
        theirs, ours = (one, other) if len(one) <= len(other) else (other, one)
        before = common_prefix(ours, theirs)
        if len(theirs) - before - common_suffix(ours[before:], theirs[before:]) >= LEAST_SAVED:
            found.append((theirs, ours))
    if not found:
        raise KvweaveError(f"no pair of {SOURCE} states the same facts")
    return found


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}?"
