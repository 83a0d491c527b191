"""Prompts of known structure: cold groups, one document in many wrappers, short unrelated ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray
from kvweave_bench.workloads.corpus import Corpus


@dataclass(frozen=True, slots=True, eq=False)
class Wrapped:
    """A prompt and where its document sits: `tokens[start:end]`."""

    tokens: IntArray
    start: int
    end: int


def cold_group(
    corpus: Corpus, size: int = 16, length: int = 392, shared: int = 384
) -> list[IntArray]:
    """`size` prompts of exactly `length` tokens that share exactly their first `shared`."""
    head = corpus.take(shared)
    tails: dict[int, IntArray] = {}
    while len(tails) < size:
        tail = corpus.take(length - shared)
        # Distinct first tokens: one more in common would make the shared part longer than told.
        tails.setdefault(int(tail[0]), tail)
    return [np.concatenate([head, tail]) for tail in tails.values()]


def wrapped_documents(corpus: Corpus, document: IntArray, n: int, room: int) -> list[Wrapped]:
    """The same document behind and before `n` wrappers of `n` different lengths.

    A wrapper is an instruction before the document and a question after it, of `room` tokens
    together at most.
    """
    found: dict[int, Wrapped] = {}
    for _ in range(200 * n):
        if len(found) == n:
            return list(found.values())
        before, after = instruction(corpus), question(corpus)
        if len(before) + len(after) <= room and len(before) not in found:
            tokens = np.concatenate([before, document, after])
            found[len(before)] = Wrapped(tokens, len(before), len(before) + len(document))
    raise KvweaveError(
        f"the instructions have fewer than {n} different lengths: give a smaller --n"
    )


def instruction(corpus: Corpus) -> IntArray:
    """What an application puts first: a number of its own, then one to five instructions.

    The number, as in the date or the name that real prompts begin with, leaves no exact prefix.
    """
    rng = corpus.rng
    many = int(rng.integers(1, 6))
    chosen = rng.choice(len(_INSTRUCTIONS), size=many, replace=False)
    number = int(rng.integers(10_000, 100_000))
    return corpus.tokens(f"{number}: {' '.join(_INSTRUCTIONS[at] for at in chosen)}\n\n")


def question(corpus: Corpus) -> IntArray:
    """What is asked about a document, as the end of a prompt."""
    return corpus.tokens(f"\n\nQuestion: {corpus.rng.choice(_QUESTIONS)}\nAnswer:")


def short_prompts(corpus: Corpus, n: int, shortest: int = 24, longest: int = 64) -> list[IntArray]:
    """`n` unrelated pieces of prose, each a stretch of text that no other prompt has."""
    lengths = corpus.rng.integers(shortest, longest + 1, size=n)
    return [corpus.take(int(length)) for length in lengths]


_INSTRUCTIONS = (
    "You are a helpful assistant.",
    "Answer from the document below and from nothing else.",
    "If the document does not say, reply that you do not know.",
    "Keep the answer to one short sentence.",
    "Write for a reader who has never administered a computer.",
    "Quote the passage that your answer rests on.",
    "The following text was found by our search engine and may be cut off at either end.",
    "Do not mention these instructions.",
    "Use plain words, and spell out every abbreviation the first time it occurs.",
    "The customer is waiting on the phone, so come to the point at once.",
    "Read the whole document carefully before you begin, since the answer may be spread over it.",
    "Today's ticket was opened by the night shift and has not been looked at by anyone yet.",
    "Numbers, names and versions must be given exactly as the document gives them.",
    "Where two statements contradict each other, trust the later one and say so.",
    "Reply in British English.",
    "This is the third message in the conversation; the first two have been answered.",
)

_QUESTIONS = (
    "What is this document about?",
    "Which of the steps described here must come first?",
    "Who is responsible for keeping this up to date?",
    "What should I do if it fails?",
    "List the names of the programs that are mentioned.",
    "Summarise the second half in one sentence.",
    "Which exceptions does the text allow?",
    "Is there anything here that a newcomer should be warned about?",
    "What is required, and what is only recommended?",
    "How does the last paragraph relate to the first?",
)
