"""Bench: the time to look up a long prompt among millions of cached tokens, without KV."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.errors import IntegrityError
from kvweave.fuzzy.anchors import SpanIndex
from kvweave.fuzzy.donors import DonorTree
from kvweave.fuzzy.planner import plan_spans
from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Namespace, RequestView
from kvweave.prefix.tree import RadixTree
from kvweave_bench.base import Bench
from kvweave_bench.measure import quiet_collector, row
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting

_PAGE = 16
_PROMPT, _DONORS = 16_384, 512  # 8,388,608 tokens in all
_QUICK_PROMPT, _QUICK_DONORS = 2048, 16
_VOCABULARY = 49_152
_WRAPPER = 64
_NAMESPACE = Namespace("bench")


def measure(setting: Setting) -> list[Row]:
    """Random token ids: look-ups read no text, and no text at hand has eight million tokens."""
    length, many = (_QUICK_PROMPT, _QUICK_DONORS) if setting.quick else (_PROMPT, _DONORS)
    rng = np.random.default_rng(setting.seed)
    store = _Store(rng.integers(_VOCABULARY, size=(many, length), dtype=np.int32))

    def hit() -> IntArray:
        """A whole donor but its first and last tokens, behind and before other ones."""
        known = store.prompts[rng.integers(many)][_WRAPPER:-_WRAPPER]
        return np.concatenate([unrelated()[:_WRAPPER], known, unrelated()[:_WRAPPER]])

    def pieces() -> IntArray:
        """Sixteen pieces of sixteen donors, each at another place than it was."""
        size = length // 16
        chosen = rng.choice(many, 16, replace=False)
        starts = rng.integers(length - size, size=16)
        parts = [
            store.prompts[at][start : start + size]
            for at, start in zip(chosen, starts, strict=True)
        ]
        return np.concatenate(parts)

    def unrelated() -> IntArray:
        return rng.integers(_VOCABULARY, size=length, dtype=np.int32)

    with setting.progress("look-ups", 3 * setting.n) as advance:
        variants = {"hit_ms": hit, "pieces_ms": pieces, "unrelated_ms": unrelated}
        expected = {"hit_ms": 1, "pieces_ms": 16, "unrelated_ms": 0}
        figures = {
            name: _timed(store, make, setting.n, expected[name], advance)
            for name, make in variants.items()
        }
    tokens = store.prompts.size
    spans = row("bytes_per_token", "spans", [store.nbytes / tokens], "bytes")
    rows = [row(name, "spans", taken, "ms") for name, taken in figures.items()]
    return [*rows, spans, *_eviction(store, setting.n)]


class _Store:
    """The built-in index over a tree of prompts, each on a path of its own."""

    def __init__(self, prompts: IntArray) -> None:
        self.prompts = prompts
        self.config = FuzzyConfig()
        pages = prompts.size // _PAGE
        self.tree = tree = RadixTree(_PAGE)
        self.donors = DonorTree(tree, pages)
        self.index = SpanIndex(self.donors, self.config)
        self.donors.listener = self.index
        root = tree.root(_NAMESPACE)
        numbers = np.arange(pages, dtype=np.int32).reshape(len(prompts), -1)
        for prompt, its_pages in zip(prompts, numbers, strict=True):
            tree.lock(root)
            node, _ = tree.extend(root, prompt, its_pages)
            tree.unlock(node)

    @property
    def nbytes(self) -> int:
        """What finding moved text needs beside the tree: anchors, and a map from pages to paths."""
        return self.index.anchors.nbytes + self.donors.nbytes

    def look_up(self, prompt: IntArray) -> int:
        """All that a request pays before KV is copied: probe, verify, plan. Returns the spans."""
        view = RequestView("bench", prompt, _NAMESPACE)
        claims = self.index.match(view, 0)
        runs = [run for claim in claims if (run := self.donors.verified(view, claim))]
        return len(plan_spans(runs, len(prompt), 0, self.config))


def _timed(
    store: _Store,
    make: Callable[[], IntArray],
    n: int,
    spans: int,
    advance: Callable[[], None],
) -> list[float]:
    """Milliseconds of `n` look-ups of different prompts; each result is checked."""
    taken = []
    store.look_up(make())
    with quiet_collector():
        for prompt in [make() for _ in range(n)]:
            start = time.perf_counter()
            found = store.look_up(prompt)
            taken.append(1e3 * (time.perf_counter() - start))
            if found != spans:
                raise IntegrityError(f"a prompt made of {spans} known pieces was found in {found}")
            advance()
    return taken


def _eviction(store: _Store, n: int) -> list[Row]:
    """What a page costs when few and when many go at once: the same, if none costs another."""
    variants = {"few pages": 16, "a whole donor": store.prompts.shape[1] // _PAGE}
    rows = []
    for name, pages in variants.items():
        taken = []
        with quiet_collector():
            for _ in range(min(n, len(store.prompts) // 3)):
                start = time.perf_counter()
                store.tree.evict(pages)
                taken.append(1e6 * (time.perf_counter() - start) / pages)
        rows.append(row("evict_us_per_page", name, taken, "us"))
    return rows


BENCH = Bench(
    name="lookup",
    counts="prompts of each kind",
    n=100,
    quick_n=10,
    measure=measure,
)
