"""The provider `semantic`: what `spans` finds, and paraphrases of the sentences in between.

Alignment comes first. Only sentences between two runs of equal tokens are compared by meaning, so
a prompt that shares nothing with a cached one is never embedded and waits for nothing. Sentences
of donors are embedded while the engine is idle.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.errors import ConfigError
from kvweave.fuzzy.anchors import SpanIndex
from kvweave.fuzzy.matcher import common_suffix
from kvweave.fuzzy.provider import Candidate, Donors, FuzzyMatchProvider, PublishedRun
from kvweave.kv.pool import IntArray
from kvweave.paraphrase.embedders import Embedder, EmbedderProcess, Vectors, check_embedder
from kvweave.paraphrase.embedding_queue import EmbeddingQueue
from kvweave.paraphrase.gate import LONGEST, Cutter, Passage, question_of
from kvweave.prefix.hash_index import namespace_seed
from kvweave.prefix.lease import Namespace, RequestView, Tier
from kvweave.prefix.tree import common_prefix


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


_SHORTEST = 4
"""Tokens of the shortest sentence that is embedded."""
_ANCHOR = 8
"""Equal tokens required on either side of a sentence that is compared."""
_WIDEST = 256
"""Most tokens between them."""
_IN_COMMON = 0.2
"""Least share of the shorter text's tokens that must occur in the other one."""
_SENTENCES = 16
"""Most sentences of one prompt that are compared."""
_NOMINEES = 4
"""Most donors proposed for one sentence."""
_NAMESPACES = 1024
"""How many of the namespaces that asked last have their donors embedded."""


class SemanticProvider(FuzzyMatchProvider):
    """Nominates donors by the cosine of whole sentences. The gate then compares their facts."""

    bounded = True

    @staticmethod
    def check_installed(config: FuzzyConfig) -> None:
        """ConfigError if the embedder's package is missing."""
        check_embedder(config.semantic_embedder)

    def __init__(
        self, donors: Donors, config: FuzzyConfig, embedder: Embedder | None = None
    ) -> None:
        """ConfigError if the embedder is not installed, or if there is no text to compare."""
        super().__init__(donors, config)
        if donors.decode is None:
            raise ConfigError(["--fuzzy-provider semantic reads text, and here is no tokenizer"])
        self._spans = SpanIndex(donors, config)
        self._cutter = Cutter(donors.decode)
        self._task_cutter = Cutter(donors.decode)  # used on the queue's thread
        self._seconds = config.semantic_budget_ms / 1000
        self.index = VectorIndex(config.semantic_index_tokens)
        self.queue = EmbeddingQueue(
            embedder or EmbedderProcess(config.semantic_embedder), running=_running(donors)
        )
        self._asked: OrderedDict[Namespace, None] = OrderedDict()
        self._written = np.zeros(donors.num_pages, np.int64)
        """By page: how often it was evicted. Tasks queued before the last time are void."""
        self._waited = self._compared = 0

    @property
    def anchors(self) -> object:
        """The span index's anchors."""
        return self._spans.anchors

    def match(self, view: RequestView, exact: int) -> Sequence[Candidate]:
        self.queue.busy()
        runs = self._spans.match(view, exact)
        if self.config.semantic_max_share == 0 or not view.semantic:
            return runs
        self._remember(view.namespace)
        if not runs or not len(self.index):
            return runs
        sentences = list(islice(self._between(view, exact, runs), _SENTENCES))
        return [*runs, *self._nominees(view, sentences)] if sentences else runs

    def on_published(self, run: PublishedRun) -> None:
        self._spans.on_published(run)
        self.queue.busy()
        if run.namespace not in self._asked or not run.semantic or self.queue.dead:
            return
        # A sentence may have begun in pages that were published before.
        first = max(0, run.start - LONGEST)
        tokens = self.donors.tokens(int(run.pages[-1]), first)
        pages, start, namespace = run.pages.copy(), run.start, run.namespace
        written = self._written[pages]
        found: list[Entry] = []

        def sentences() -> Sequence[str]:
            found.extend(
                Entry(namespace, int(pages[(end - 1 - start) // self.donors.page_size]), at, words)
                for at, end, words in self._whole(tokens, first)
                if end > start and not self.index.knows(namespace, words)
            )
            return [self._task_cutter.text(entry.tokens) for entry in found]

        def enter(vectors: Vectors) -> None:
            fresh = set(pages[self._written[pages] == written].tolist())
            at = [i for i, entry in enumerate(found) if entry.page in fresh]
            self.index.add([found[i] for i in at], vectors[at])

        self.queue.later(namespace, sentences, enter)

    def on_evicted(self, pages: IntArray) -> None:
        self._spans.on_evicted(pages)
        self._written[pages] += 1
        self.index.remove(pages.tolist())

    def clear(self) -> None:
        self._spans.clear()
        self._written += 1
        self.index.clear()

    def settle(self, seconds: float) -> bool:
        return self.queue.settle(seconds)

    def stats(self) -> Mapping[str, float]:
        return {
            **self._spans.stats(),
            "passages": len(self.index),
            "passage_tokens": self.index.tokens,
            "passage_bytes": self.index.nbytes,
            "compared": self._compared,
            "not_ready": self._waited,
            **self.queue.counts,
        }

    def _remember(self, namespace: Namespace) -> None:
        self._asked[namespace] = None
        self._asked.move_to_end(namespace)
        if len(self._asked) > _NAMESPACES:
            self._asked.popitem(last=False)

    def _whole(self, tokens: IntArray, first: int) -> Iterator[tuple[int, int, IntArray]]:
        """Sentences that begin and end in `tokens`: start, end and tokens of each."""
        for at, passage in enumerate(cut := self._task_cutter.cut(tokens, first)):
            begins = at > 0 or first == 0
            ends = at < len(cut) - 1
            length = passage.end - passage.start
            if begins and ends and _SHORTEST <= length <= LONGEST:
                words = tokens[passage.start - first : passage.end - first].copy()
                yield passage.start, passage.end, words

    def _between(
        self, view: RequestView, exact: int, runs: Sequence[Candidate]
    ) -> Iterator[Passage]:
        """Sentences with tokens that `runs` do not cover, between runs."""
        question = question_of(view)
        reached = there = exact
        for run in sorted(runs, key=lambda run: run.start):
            if run.length < self.config.min_span:
                continue
            if reached < min(run.start, question) and self._alike(view, reached, there, run):
                yield from self._in_gap(view, reached, run.start, question)
            if run.end > reached:
                reached, there = run.end, run.donor_end

    def _alike(self, view: RequestView, begin: int, there: int, run: Candidate) -> bool:
        """Whether the tokens from `begin` to `run` may paraphrase the donor's from `there` to it.

        Both follow the same tokens, are about equally long, and have tokens in common if they are
        long. A prompt that shares only a header and a footer must not wait for an embedder.
        """
        ours, theirs = run.start - begin, run.donor_start - there
        if not (0 < theirs <= 2 * ours + _ANCHOR and ours <= min(_WIDEST, 2 * theirs + _ANCHOR)):
            return False
        before = self.donors.run_around(view, begin - 1, run.page, there - 1)
        if before is None or before.length < _ANCHOR:
            return False
        if ours <= self.config.min_span:
            return True
        said = np.unique(view.tokens[begin : run.start])
        heard = np.unique(self.donors.tokens(run.page, there)[:theirs])
        common = len(np.intersect1d(said, heard, assume_unique=True))
        return common >= _IN_COMMON * min(len(said), len(heard))

    def _in_gap(self, view: RequestView, begin: int, end: int, question: int) -> Iterator[Passage]:
        first = max(0, begin - LONGEST)
        text = view.tokens[first : end + LONGEST]
        for at, passage in enumerate(self._cutter.cut(text, first)):
            computed = min(passage.end, end) - max(passage.start, begin)
            worth_it = computed >= self.config.semantic_min_span and passage.end <= question
            cut_off = at == 0 and first > 0
            if not worth_it or cut_off or not _SHORTEST <= passage.end - passage.start <= LONGEST:
                continue
            # Equal text in the cache needs no paraphrase.
            if not self.index.knows(view.namespace, view.tokens[passage.start : passage.end]):
                yield passage

    def _nominees(self, view: RequestView, sentences: list[Passage]) -> Iterator[Candidate]:
        """Donors for each sentence whose vector is ready in time, the most similar first."""
        texts = [self._cutter.text(view.tokens[one.start : one.end]) for one in sentences]
        vectors = self.queue.vectors(view.namespace, texts, self._seconds)
        least = self.config.semantic_threshold
        for sentence, vector in zip(sentences, vectors, strict=True):
            if vector is None:
                self._waited += 1
                continue
            self._compared += 1
            for cosine, entry in self.index.nearest(view.namespace, vector, _NOMINEES, least):
                found = self._fitted(view.tokens, sentence, entry, cosine)
                if found is not None:
                    yield found

    def _fitted(
        self, tokens: IntArray, sentence: Passage, entry: Entry, cosine: float
    ) -> Candidate | None:
        """The donor's differing tokens in place of the sentence's; None where they do not fit."""
        ours, theirs = tokens[sentence.start : sentence.end], entry.tokens
        before = common_prefix(ours, theirs)
        after = common_suffix(ours[before:], theirs[before:])
        length = len(theirs) - before - after
        region = len(ours) - before - after
        if not self.config.semantic_min_span <= length <= region:
            return None
        end = sentence.end - after
        return Candidate(
            start=end - length,
            length=length,
            page=entry.page,
            donor_start=entry.start + before,
            tier=Tier.PARAPHRASE,
            lead=region - length,
            similarity=min(cosine, 1.0),
            donor_tokens=theirs[before : before + length],
        )


def _running(donors: Donors) -> Callable[[], bool]:
    """Whether requests run. Holds `donors` weakly: the queue's thread must not keep them alive."""
    known = weakref.ref(donors)

    def running() -> bool:
        there = known()
        return there is not None and there.running > 0

    return running
