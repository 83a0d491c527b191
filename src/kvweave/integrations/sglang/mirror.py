"""The texts in SGLang's tree, kept as tokens in a tree of our own with the span index on top.

SGLang's tree says where a prefix lies, but not what else it holds: it shows no tokens. So the
mirror keeps the tokens of every published path, in a tree whose pages have numbers but no KV.
The mirror proposes donors; SGLang's tree, asked by tokens, decides whether they are still cached.

Nothing here depends on slots, devices or time. Ranks that see the same requests in the same order
therefore come to the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.anchors import SpanIndex
from kvweave.fuzzy.donors import DonorTree
from kvweave.fuzzy.guard import Guard, LentDonors
from kvweave.fuzzy.planner import plan_spans
from kvweave.fuzzy.provider import Candidate
from kvweave.kv.journal import atomic
from kvweave.kv.pool import IntArray, PagePool
from kvweave.prefix.lease import Namespace, RequestView
from kvweave.prefix.tree import Node, RadixTree

_HITS_TRIED = 1024
"""Windows of one prompt whose places are compared, before its search ends."""

_NEAR = 16
"""Tokens before a piece that must be its donor's, too, for nothing of it to be computed again."""


class BoundedIndex(SpanIndex):
    """The span index with a bound on its work that is a number, not a time.

    So every rank finds the same, however busy it is.
    """

    def match(self, view: RequestView, exact: int) -> Sequence[Candidate]:
        self._left = _HITS_TRIED
        return super().match(view, exact)

    def _longest(self, view: RequestView, offset: int, anchor: int) -> Candidate | None:
        self._left -= 1
        return super()._longest(view, offset, anchor) if self._left >= 0 else None


class Piece(NamedTuple):
    """A piece of a prompt that one donor serves."""

    span: Candidate
    continues: bool
    """The text before it is its donor's own, too."""


class Mirror:
    """The texts of at most `num_pages` pages, the least recently used going first."""

    def __init__(self, page_size: int, num_pages: int, config: FuzzyConfig) -> None:
        self.version = 0
        """Changes whenever the result of `find` may."""
        self._size = page_size
        self._config = replace(config, time_budget_ms=math.inf)
        self._pool = PagePool(num_pages, page_size)
        self._journal = self._pool.journal
        self._tree = RadixTree(page_size, journal=self._journal)
        self._donors = DonorTree(self._tree, num_pages)
        lent = LentDonors(self._donors)
        self._guard = Guard("spans", BoundedIndex(lent, self._config), lent, math.inf)
        self._donors.listener = self._guard

    @atomic
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
        self._journal.fields(self, "version")
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

    def find(self, view: RequestView, exact: int) -> list[Piece]:
        """The pieces that the planner serves of a prompt, `exact` tokens of which are cached.

        Every token is compared; whether SGLang still has the KV is another question.
        """
        runs = [
            run
            for claim in self._guard.match(view, exact)
            if (run := self._donors.verified(view, claim)) is not None
        ]
        pieces = plan_spans(runs, len(view.tokens), exact, self._config)
        return [Piece(piece, self._continues(view, piece)) for piece in pieces]

    def _continues(self, view: RequestView, piece: Candidate) -> bool:
        first = max(0, piece.donor_start - min(_NEAR, piece.start))
        earlier = self._donors.tokens(piece.page, first)[: piece.donor_start - first]
        return len(earlier) > 0 and np.array_equal(
            earlier, view.tokens[piece.start - len(earlier) : piece.start]
        )

    def path(self, piece: Candidate) -> IntArray:
        """The tokens of a donor's prompt up to the end of the page that holds the run's end."""
        return self._donors.tokens(piece.page)

    @atomic
    def use(self, namespace: Namespace, path: IntArray) -> None:
        """A request is served from this donor."""
        place = self._tree.find(namespace, path)
        if place is not None:
            self._tree.touch(place.node)

    @atomic
    def drop(self, namespace: Namespace, path: IntArray, kept: int) -> None:
        """SGLang has only the first `kept` tokens of this path; forget what follows.

        It evicts from the ends of paths, so all that goes on from there is gone, too.
        """
        place = self._tree.find(namespace, path)
        if place is None or self._tree.length(place) <= kept:
            return
        node: Node = place.node
        below: Node | None = None
        while node.parent is not None and node.start >= kept:
            node, below = node.parent, node
        self._journal.fields(self, "version")
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

    @atomic
    def clear(self) -> None:
        """SGLang's tree was emptied."""
        pages = [node.pages.copy() for node in self._tree.nodes()]
        self._tree.reset()
        for run in pages:
            self._pool.drop(run)
        self._journal.fields(self, "version")
        self.version += 1

    def check(self) -> None:
        """Prove that pages, anchors and tree add up; IntegrityError where they do not."""
        self._tree.check()
        self._donors.check(self._tree)
        self._pool.check([node.pages for node in self._tree.nodes()])

    def stats(self) -> dict[str, float]:
        """Numbers worth watching, by name."""
        return {"pages": self._tree.cached_pages, **self._guard.stats()}


def as_tokens(ids: object) -> IntArray:
    """SGLang's token ids (array('q')) as int32."""
    return np.array(ids, np.int64).astype(np.int32)
