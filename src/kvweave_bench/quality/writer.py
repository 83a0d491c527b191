"""Writes prompts with known answers out of real text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray
from kvweave_bench.quality.chat import Chat
from kvweave_bench.texts import Text
from kvweave_bench.workloads.corpus import MANUALS, Corpus
from kvweave_bench.workloads.prompts import instruction, question


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One recipient prompt, and the prompts that were served before it.

    `question` is what people are shown of it, with the sentence that answers it in `stated`.
    `gold` is the answer; `decoy` the one that a donor's text would give. None: nothing to judge.
    """

    donors: tuple[IntArray, ...]
    recipient: IntArray
    question: str
    stated: str = ""
    gold: str | None = None
    decoy: str | None = None
    protected_from: int | None = None
    """Where the recipient's last turn begins, where that matters."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A passage that states a fact, and the question after that fact."""

    passage: IntArray
    question: str
    stated: str
    gold: str


class Writer:
    """Prose, passages and questions in one model's tokens; the corpus's seed chooses them."""

    def __init__(self, corpus: Corpus, chat: Chat, quick: bool = False) -> None:
        self.corpus = corpus
        self.chat = chat
        self.rng = corpus.rng
        self.quick = quick
        self._sentences = self._shuffled()

    def length(self, tokens: int) -> int:
        """A length in tokens; half of it where only a smoke test is wanted."""
        return tokens // 2 if self.quick else tokens

    def tokens(self, text: str) -> IntArray:
        return self.corpus.tokens(text)

    def prompt(self, body: IntArray, asked: str | None = None) -> IntArray:
        """An instruction never given before, the body, and a question (any, if none is given)."""
        ending = question(self.corpus) if asked is None else self.tokens(f"\n\n{asked}")
        return self.chat.prompt(
            ("system", instruction(self.corpus)), ("user", np.concatenate([body, ending]))
        )

    def prose(self, tokens: int) -> IntArray:
        """Whole sentences of manuals and of a bank's documents, just more than so many tokens."""
        parts: list[IntArray] = []
        size = 0
        while size <= tokens:
            parts.append(self.tokens(next(self._sentences) + " "))
            size += len(parts[-1])
        return np.concatenate(parts)

    def documents(self, count: int, length: int) -> list[tuple[str, IntArray]]:
        """Titles and first `length` tokens of so many of a bank's documents."""
        fitting = self._long_documents(length)
        if len(fitting) < count:
            raise KvweaveError(f"only {len(fitting)} documents have {length} tokens of this model")
        chosen = self.rng.choice(len(fitting), count, replace=False)
        return [fitting[int(at)] for at in chosen]

    def asked(self, length: int) -> Asked:
        """A passage of `length` tokens; somewhere in its first half it tells about a country."""
        fitting = [each for each in self._told if len(each[1]) < 0.6 * length]
        if not fitting:
            raise KvweaveError(f"no country can be told of in {length} tokens of this model")
        country, about = fitting[int(self.rng.integers(len(fitting)))]
        before = self.prose(int(self.rng.integers(1, length - len(about))) // 2)
        before = before[: length - len(about)]
        rest = self.prose(max(0, length - len(before) - len(about)))
        passage = np.concatenate([before, about, rest])[:length]
        question, key = question_about(country, self.rng)
        gold = country.facts[key]
        stated = next(each for each in re.split(r"(?<=\.) ", country.body) if gold in each)
        return Asked(passage, question, stated, gold)

    @cache  # noqa: B019  (a bench has one writer, which lives as long as it does)
    def _long_documents(self, length: int) -> list[tuple[str, IntArray]]:
        """Of at least so many tokens, cut to that, each under its title."""
        texts = self.corpus.collection("banking").texts
        found = [(each.title, self.tokens(f"# {each.title}\n\n{each.body}")) for each in texts]
        return [(title, tokens[:length]) for title, tokens in found if len(tokens) >= length]

    @cached_property
    def countries(self) -> list[Text]:
        """Those that state everything that is asked for, and one currency."""
        texts = self.corpus.collection("countries").texts
        return [
            text
            for text in texts
            if all(text.facts.get(key) for key in _QUESTIONS)
            and "," not in text.facts["currencies"]  # one answer, not a list of them
        ]

    @cached_property
    def _told(self) -> list[tuple[Text, IntArray]]:
        """Countries, and what is said about each, as a paragraph of its own."""
        return [(each, self.tokens(f"\n\n{_short(each)}\n\n")) for each in self.countries]

    def _shuffled(self) -> Iterator[str]:
        """Sentences in runs as they were written, the runs in random order, for ever."""
        texts = [self.corpus.collection(name).texts[0].body for name in MANUALS]
        texts += [text.body for text in self.corpus.collection("banking").texts]
        paragraphs = [part for text in texts for part in text.split("\n\n")]
        while True:
            for at in self.rng.permutation(len(paragraphs)):
                line = " ".join(paragraphs[at].split())
                if len(line.split()) >= 12:
                    yield from re.split(r"(?<=[.!?]) ", line)


def _short(country: Text) -> str:
    """What is said about a country, up to its longest lists."""
    return re.split(r" The (?:provinces|codes of the neighbours) of ", country.body)[0]


def question_about(country: Text, rng: np.random.Generator) -> tuple[str, str]:
    """A question about a country, and the name of the fact that answers it."""
    key = str(rng.choice(list(_QUESTIONS)))
    return _QUESTIONS[key].format(name=country.title), key


_QUESTIONS = {
    "capital": "What is the capital of {name}?",
    "population": "How many inhabitants does {name} have?",
    "area": "What is the area of {name}?",
    "currencies": "In which currency does one pay in {name}?",
}
