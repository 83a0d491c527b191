"""The shapes in which earlier text returns: a recipient and the donors before it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvweave.kv.pool import IntArray
from kvweave_bench.workloads.corpus import Corpus
from kvweave_bench.workloads.prompts import instruction, question


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One recipient prompt, and the prompts that were served before it."""

    donors: tuple[IntArray, ...]
    recipient: IntArray


Builder = Callable[[Corpus, int], Case]
"""Builds one case whose recipient has about the given number of tokens."""


def new_wrapper(corpus: Corpus, length: int) -> Case:
    """One document, another instruction before it and another question after it."""
    document = corpus.take(length)
    return Case((_prompt(corpus, document),), _prompt(corpus, document))


def edited(corpus: Corpus, length: int) -> Case:
    """One word of every 300 replaced by another word of the same text."""
    words = corpus.words(int(length / _TOKENS_PER_WORD))
    after = list(words)
    for at in range(150, len(words), 300):
        others = [word for word in words if word != words[at]]
        after[at] = str(corpus.rng.choice(others))
    donor, recipient = (corpus.tokens(" ".join(each)) for each in (words, after))
    return Case((_prompt(corpus, donor),), _prompt(corpus, recipient))


def reordered(blocks: int) -> Builder:
    """The same blocks in another order, no two of them neighbours as before."""

    def build(corpus: Corpus, length: int) -> Case:
        parts = [corpus.take(length // blocks) for _ in range(blocks)]
        order = corpus.rng.permutation(blocks)
        while np.any(np.diff(order) == 1):
            order = corpus.rng.permutation(blocks)
        shuffled = [parts[at] for at in order]
        return Case((_prompt(corpus, *parts),), _prompt(corpus, *shuffled))

    return build


def three_donors(corpus: Corpus, length: int) -> Case:
    """Six passages, two from each of three earlier prompts of four passages."""
    piece = length // 6
    held = [[corpus.take(piece) for _ in range(4)] for _ in range(3)]
    picked = [passages[at] for passages in held for at in corpus.rng.choice(4, 2, replace=False)]
    mixed = [picked[at] for at in corpus.rng.permutation(len(picked))]
    return Case(tuple(_prompt(corpus, *passages) for passages in held), _prompt(corpus, *mixed))


def partly_shared(corpus: Corpus, length: int) -> Case:
    """35 % of the recipient is in the donor, in two places; the rest is new."""
    known = [corpus.take(int(0.175 * length)) for _ in range(2)]
    new = [corpus.take(int(0.65 * length / 3)) for _ in range(3)]
    donor = _prompt(corpus, known[0], corpus.take(length // 3), known[1], corpus.take(length // 3))
    return Case((donor,), _prompt(corpus, new[0], known[1], new[1], known[0], new[2]))


def subset(corpus: Corpus, length: int) -> Case:
    """A third of a donor three times as long, from its middle."""
    document = corpus.take(3 * length)
    start = int(corpus.rng.integers(length // 4, 7 * length // 4))
    return Case((_prompt(corpus, document),), _prompt(corpus, document[start : start + length]))


def unrelated(corpus: Corpus, length: int) -> Case:
    """Nothing in common but the wrapper's phrases."""
    return Case((_prompt(corpus, corpus.take(length)),), _prompt(corpus, corpus.take(length)))


def near_duplicate(corpus: Corpus, length: int) -> Case:
    """Passages about countries, each with one number, name or negation changed."""
    texts = corpus.collection("countries").texts
    before: list[str] = []
    after: list[str] = []
    size = 0
    while size < length:
        (text,) = corpus.passages("countries", 1)
        other = texts[int(corpus.rng.integers(len(texts)))]
        changed = _change(text.body, text.facts, other.facts, corpus.rng)
        if changed != text.body:
            before.append(text.body)
            after.append(changed)
            size += len(corpus.tokens(text.body)) + 1
    donor, recipient = (corpus.tokens("\n".join(passages)) for passages in (before, after))
    return Case((_prompt(corpus, donor),), _prompt(corpus, recipient))


SHAPES: dict[str, Builder] = {
    "new-wrapper": new_wrapper,
    "edited": edited,
    "reordered-4": reordered(4),
    "reordered-16": reordered(16),
    "three-donors": three_donors,
    "shared-35": partly_shared,
    "subset": subset,
    "unrelated": unrelated,
    "near-duplicate": near_duplicate,
}

_TOKENS_PER_WORD = 1.4


def _prompt(corpus: Corpus, *parts: IntArray) -> IntArray:
    return np.concatenate([instruction(corpus), *parts, question(corpus)])


def _change(
    body: str, facts: dict[str, str], other: dict[str, str], rng: np.random.Generator
) -> str:
    """The passage with one fact taken from another country, or one statement denied."""
    key = str(rng.choice(("capital", "population", "area", "not")))
    if key == "not":
        return re.sub(r" is ", " is not ", body, count=1)
    if key not in facts or key not in other:
        return body
    return body.replace(facts[key], other[key], 1)
