"""An index of donors' passages by embedding vector; an entry lives as long as its page."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvweave.kv.pool import IntArray
from kvweave.paraphrase.embedders import Vectors
from kvweave.prefix.hash_index import namespace_seed
from kvweave.prefix.lease import Namespace


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A donor's passage: `tokens` at position `start` of its path, the last one in `page`."""

    namespace: Namespace
    page: int
    start: int
    tokens: IntArray


class VectorIndex:
    """Passages by vector. A search is one matrix product over all rows (some ten thousand).

    Holds passages of at most `most_tokens` tokens; the oldest are dropped first. Entry numbers are
    never reused. Thread-safe.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._lock = threading.Lock()
        self._vectors: Vectors = np.zeros((0, 0), np.float32)
        self._number = np.zeros(0, np.int64)
        """By row: the entry's number; -1 where there is none."""
        self._namespace = np.zeros(0, np.uint64)
        """By row: a hash of the entry's namespace."""
        self._entries: dict[int, tuple[int, Entry]] = {}
        """By number, oldest first: row and entry."""
        self._on_page: dict[int, set[int]] = {}
        self._texts: dict[tuple[Namespace, bytes], int] = {}
        self._free: list[int] = []
        self._tokens = 0
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Tokens of all entries."""
        return self._tokens

    @property
    def nbytes(self) -> int:
        return self._vectors.nbytes + 4 * self._tokens

    def knows(self, namespace: Namespace, tokens: IntArray) -> bool:
        """Whether the same text of the same namespace is in already."""
        return (namespace, tokens.tobytes()) in self._texts

    def add(self, entries: Iterable[Entry], vectors: Vectors) -> list[int]:
        """Enter each with its vector (n, dimension); returns their numbers, -1 for known texts."""
        with self._lock:
            return [self._add(entry, row) for entry, row in zip(entries, vectors, strict=True)]

    def remove(self, pages: Iterable[int]) -> None:
        """Drop the entries that end in these pages."""
        with self._lock:
            for page in pages:
                for number in list(self._on_page.get(page, ())):
                    self._remove(number)

    def clear(self) -> None:
        with self._lock:
            for number in list(self._entries):
                self._remove(number)

    def nearest(
        self, namespace: Namespace, vector: Vectors, most: int, least: float
    ) -> list[tuple[float, Entry]]:
        """Up to `most` entries of the namespace whose cosine is at least `least`, best first."""
        with self._lock:
            if not self._entries:
                return []
            cosine = self._vectors @ vector
            others = self._namespace != np.uint64(namespace_seed(namespace))
            cosine[others | (self._number < 0)] = -2.0
            count = min(most, len(cosine))
            rows = np.argpartition(-cosine, count - 1)[:count]
            rows = rows[np.argsort(-cosine[rows], kind="stable")]
            found = [
                (float(cosine[row]), self._entries[int(self._number[row])][1])
                for row in rows.tolist()
                if cosine[row] >= max(least, -1.0)
            ]
        return [each for each in found if each[1].namespace == namespace]

    def check(self) -> None:
        """AssertionError unless rows, numbers, pages and sums agree."""
        with self._lock:
            rows = {row for row, _ in self._entries.values()}
            used = set(np.flatnonzero(self._number >= 0).tolist())
            assert rows == used
            assert not rows & set(self._free)
            assert set().union(*self._on_page.values()) == set(self._entries)
            assert self._tokens == sum(len(e.tokens) for _, e in self._entries.values())
            assert set(self._texts.values()) == set(self._entries)

    def _add(self, entry: Entry, vector: Vectors) -> int:
        key = (entry.namespace, entry.tokens.tobytes())
        if key in self._texts or len(entry.tokens) > self._most_tokens:
            return -1
        while self._tokens + len(entry.tokens) > self._most_tokens:
            self._remove(next(iter(self._entries)))
        if not self._free:
            self._grow(len(vector))
        row, number = self._free.pop(), self._next
        self._next += 1
        self._vectors[row] = vector
        self._number[row] = number
        self._namespace[row] = namespace_seed(entry.namespace)
        self._entries[number] = row, entry
        self._on_page.setdefault(entry.page, set()).add(number)
        self._texts[key] = number
        self._tokens += len(entry.tokens)
        return number

    def _remove(self, number: int) -> None:
        row, entry = self._entries.pop(number)
        self._number[row] = -1
        self._free.append(row)
        on_page = self._on_page[entry.page]
        on_page.discard(number)
        if not on_page:
            del self._on_page[entry.page]
        del self._texts[entry.namespace, entry.tokens.tobytes()]
        self._tokens -= len(entry.tokens)

    def _grow(self, dimension: int) -> None:
        old = len(self._vectors)
        new = max(64, 2 * old)
        vectors = np.zeros((new, dimension), np.float32)
        if old:
            vectors[:old] = self._vectors
        self._vectors = vectors
        self._number = np.append(self._number, np.full(new - old, -1))
        self._namespace = np.append(self._namespace, np.zeros(new - old, np.uint64))
        self._free += range(new - 1, old - 1, -1)
