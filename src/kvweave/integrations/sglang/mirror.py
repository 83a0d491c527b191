"""The texts in SGLang's tree, kept as tokens in a tree of our own with the span index on top.

SGLang's tree says where a prefix lies, but not what else it holds: its core shows no tokens. So the
paths that requests publish are kept once more, as tokens, in a tree of our own whose pages are mere
numbers. It decides what to look for; SGLang's tree, asked by tokens, decides whether it is there.

Nothing here depends on slots, devices or time. Ranks that see the same requests in the same order
therefore come to the same decisions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.donors import DonorTree
from kvweave.fuzzy.guard import Guard, LentDonors
from kvweave.fuzzy.matcher import window_hashes
from kvweave.fuzzy.planner import plan_spans
from kvweave.fuzzy.provider import Candidate
from kvweave.fuzzy.span_index import SpanIndex
from kvweave.kv.pool import IntArray, PagePool
from kvweave.prefix.hash_index import namespace_seed
from kvweave.prefix.lease import Namespace, RequestView
from kvweave.prefix.tree import Node, RadixTree

CHAIN = 32
"""Most donors that one prompt takes runs from, one after another."""


class FrontIndex(SpanIndex):
    """The span index asked for one thing: runs that go on where the exact prefix ends.

    That is all that SGLang can take in. A run that covers position p, and at least 2 x stride - 2
    tokens behind it, holds a whole block of its donor that begins within a stride from p. So a few
    windows are looked at per donor, whatever the prompt's length: no time limit, and so no
    difference between ranks.
    """

    def match(self, view: RequestView, exact: int) -> list[Candidate]:
        runs: list[Candidate] = []
        front = exact
        while len(runs) < CHAIN and (run := self._covering(view, front)) is not None:
            runs.append(run)
            front = run.end
        return runs

    def _covering(self, view: RequestView, position: int) -> Candidate | None:
        """The run through `position` that reaches furthest."""
        near = view.tokens[position : position + 2 * self._stride - 1]
        seed = namespace_seed(view.namespace)
        offsets, anchors = self.anchors.probe(window_hashes(near, self._stride, seed))
        best: Candidate | None = None
        for offset, anchor in zip((offsets + position).tolist(), anchors.tolist(), strict=True):
            run = self._longest(view, offset, anchor)
            if run is not None and run.start <= position and (not best or run.end > best.end):
                best = run
        return best


class Mirror:
    """The texts of at most `num_pages` pages, the least recently used going first."""

    def __init__(self, page_size: int, num_pages: int, config: FuzzyConfig) -> None:
        self.version = 0
        """Changes whenever what can be found does."""
        self._size = page_size
        self._config = replace(config, time_budget_ms=math.inf)
        self._pool = PagePool(num_pages, page_size)
        self._tree = RadixTree(page_size)
        self._donors = DonorTree(self._tree, num_pages)
        lent = LentDonors(self._donors)
        self._guard = Guard("spans", FrontIndex(lent, self._config), lent, math.inf)
        self._donors.listener = self._guard

    def add(self, rid: str, namespace: Namespace, tokens: IntArray) -> None:
        """SGLang's tree holds these tokens (int32, whole pages) from position 0 on."""
        if not len(tokens):
            return
        tree, size = self._tree, self._size
        place = tree.descend(root := tree.root(namespace), tokens)
        known = tree.length(place)
        if known == len(tokens):
            tree.touch(place.node)
            return
        self.version += 1
        node = tree.cut(place) if known else root
        tree.lock(node)
        pages = self._room((len(tokens) - known) // size)
        if len(pages):
            self._donors.publisher = rid
            node, _ = tree.extend(node, tokens[known : known + len(pages) * size], pages)
        tree.touch(node)
        tree.unlock(node)

    def _room(self, pages: int) -> IntArray:
        """That many pages, or as many as there are without those that are locked."""
        for run in self._tree.evict(pages - self._pool.num_free):
            self._pool.drop(run)
        taken = self._pool.alloc(min(pages, self._pool.num_free))
        assert taken is not None
        return taken

    def find(self, view: RequestView, exact: int, limit: int | None = None) -> list[Candidate]:
        """Runs that serve the prompt from position `exact` on without a gap, in order.

        Whole pages together, if any, and no token at or behind position `limit`. Every token is
        compared; whether SGLang still has the KV is another question.
        """
        runs = [
            run
            for claim in self._guard.match(view, exact)
            if (run := self._donors.verified(view, claim)) is not None
        ]
        chain: list[Candidate] = []
        front = exact
        for piece in plan_spans(runs, len(view.tokens), exact, self._config):
            if piece.start != front:
                break
            chain.append(piece)
            front = piece.end
        return _whole_pages(chain, exact, self._size, limit)

    def path(self, piece: Candidate) -> IntArray:
        """The tokens of a donor's prompt up to the end of the page that holds the run's end."""
        return self._donors.tokens(piece.page)

    def use(self, piece: Candidate) -> None:
        """A request is served from this donor."""
        node = self._donors.node(piece.page)
        if node is not None:
            self._tree.touch(node)

    def drop(self, piece: Candidate, kept: int) -> None:
        """SGLang has only the first `kept` tokens of this donor's path; forget what follows.

        It evicts from the ends of paths, so all that goes on from there is gone, too.
        """
        node, below = self._donors.node(piece.page), None
        while node is not None and node.parent is not None and node.start >= kept:
            node, below = node.parent, node
        if node is None:
            return
        self.version += 1
        keep = (kept - node.start) // self._size
        if keep < len(node.pages):
            for child in list(node.children.values()):
                self._drop_below(child)
            self._trim(node, keep)
        elif below is not None:  # its siblings may be there still
            self._drop_below(below)

    def _drop_below(self, top: Node) -> None:
        order, stack = [], [top]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(node.children.values())
        for node in reversed(order):
            self._trim(node, 0)

    def _trim(self, node: Node, keep: int) -> None:
        gone = node.pages[keep:].copy()
        if len(gone):
            self._tree.trim(node, keep)
            self._pool.drop(gone)

    def clear(self) -> None:
        """SGLang's tree was emptied."""
        pages = [node.pages.copy() for node in self._tree.nodes()]
        self._tree.reset()
        for run in pages:
            self._pool.drop(run)
        self.version += 1

    def check(self) -> None:
        """Prove that pages, anchors and tree add up; IntegrityError where they do not."""
        self._tree.check()
        self._donors.check(self._tree)
        self._pool.check([node.pages for node in self._tree.nodes()])

    def stats(self) -> dict[str, float]:
        """Numbers worth watching, by name."""
        return {"pages": self._tree.cached_pages, **self._guard.stats()}


def _whole_pages(
    chain: list[Candidate], start: int, size: int, limit: int | None
) -> list[Candidate]:
    """`chain`, which begins at `start` (a multiple of `size`), cut to whole pages below `limit`."""
    if not chain:
        return []
    end = chain[-1].end if limit is None else min(chain[-1].end, limit)
    end = start + max(0, end - start) // size * size
    kept = [piece for piece in chain if piece.start < end]
    if kept and kept[-1].end > end:
        kept[-1] = replace(kept[-1], length=end - kept[-1].start)
    return kept


def as_tokens(ids: object) -> IntArray:
    """SGLang's token ids (array('q')) as int32."""
    return np.array(ids, np.int64).astype(np.int32)
