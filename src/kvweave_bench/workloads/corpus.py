"""Real text as tokens, handed out so that two prompts never share any by accident."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np

from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray
from kvweave_bench.texts import Collection, Text, load

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens."""

_Item = TypeVar("_Item")

MANUALS = ("debian-faq", "debian-policy", "debian-reference-en")


class Corpus:
    """Manuals, titled documents and country passages, tokenised by one model's tokenizer.

    `take` walks through the manuals and then the titled documents once, from a place that the seed
    chooses, and never hands out a token twice. (The texts themselves may repeat a phrase: the
    oracle, not this walk, says what two prompts share.)
    """

    def __init__(self, encode: Encode, seed: int) -> None:
        self.encode = encode
        self.rng = np.random.default_rng(seed)
        self._collections: dict[str, Collection] = {}
        self._stream: IntArray | None = None
        self._taken = 0
        self._words: Iterator[str] | None = None
        self._passages: dict[str, Iterator[Text]] = {}

    @property
    def origins(self) -> dict[str, str]:
        """Package and version of every source read so far."""
        return {name: found.origin for name, found in self._collections.items()}

    def collection(self, name: str) -> Collection:
        if name not in self._collections:
            self._collections[name] = load(name)
        return self._collections[name]

    def tokens(self, text: str) -> IntArray:
        """The text's token ids, int32."""
        return np.asarray(self.encode(text), np.int32)

    def take(self, n: int) -> IntArray:
        """The next `n` tokens of running prose. Raises KvweaveError when the texts are used up."""
        if self._stream is None:
            self._stream = self._read_all()
        if self._taken + n > len(self._stream):
            raise KvweaveError(
                f"the bench has used up all {len(self._stream):,} tokens of its texts: "
                "give a smaller --n"
            )
        self._taken += n
        return self._stream[self._taken - n : self._taken]

    def words(self, n: int) -> list[str]:
        """The next `n` words of the manuals, from a place that the seed chooses; none twice."""
        if self._words is None:
            texts = [self.collection(name).texts[0].body for name in MANUALS]
            words = " ".join(texts).split(" ")
            start = int(self.rng.integers(len(words)))
            self._words = iter(words[start:] + words[:start])
        return self._next(self._words, n, "words")

    def passages(self, name: str, n: int) -> list[Text]:
        """The next `n` texts of a collection, in an order that the seed chooses; none twice."""
        if name not in self._passages:
            texts = self.collection(name).texts
            order = self.rng.permutation(len(texts))
            self._passages[name] = iter([texts[at] for at in order])
        return self._next(self._passages[name], n, f"texts of {name}")

    @staticmethod
    def _next(source: Iterator[_Item], n: int, what: str) -> list[_Item]:
        taken = list(islice(source, n))
        if len(taken) < n:
            raise KvweaveError(f"the bench has used up all {what}: give a smaller --n")
        return taken

    def _read_all(self) -> IntArray:
        texts = [self.collection(name).texts[0].body for name in MANUALS]
        texts += [f"{each.title}\n{each.body}" for each in self.collection("banking").texts]
        # Paragraph by paragraph: tokenizers slow down on one string of half a megabyte.
        paragraphs = [part + "\n\n" for text in texts for part in text.split("\n\n")]
        stream = np.concatenate([self.tokens(part) for part in paragraphs])
        return np.roll(stream, -int(self.rng.integers(len(stream))))
