"""Proposes an order of a prompt's pieces that makes its exact cached prefix longer.

Exact reuse ends where two prompts first differ. Applications that put retrieved passages into a
prompt often accept any order, and an order that the cache has seen needs no approximation. kvweave
never reorders by itself: `propose` returns an order and its gain, and the caller decides.

    proposal = propose(Pieces(head, passages, tail), SeenPrompts(earlier_prompts))
    if proposal.gain:
        passages = [passages[at] for at in proposal.order]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvweave.kv.pool import IntArray
from kvweave.prefix.contract import PrefixCache
from kvweave.prefix.lease import Namespace, RequestView


class Prefixes(Protocol):
    """Knows which prefixes of a prompt are cached."""

    @property
    def page_size(self) -> int:
        """Lengths are multiples of it: up to `page_size - 1` more tokens may match."""

    def match_length(self, tokens: IntArray) -> int:
        """Tokens at the beginning of `tokens` (int32) that are known."""


def _nothing() -> IntArray:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """A prompt in pieces: int32 token ids, tokenised one by one, separators included.

    `head` stays first and `tail` last; `movable` may come in any order.
    """

    head: IntArray
    movable: Sequence[IntArray]
    tail: IntArray = field(default_factory=_nothing)

    def prompt(self, order: Iterable[int]) -> IntArray:
        """All tokens, the movable pieces in the given order."""
        return np.concatenate([self.head, *(self.movable[at] for at in order), self.tail])


@dataclass(frozen=True, slots=True)
class Proposal:
    """`order` lists indices of the movable pieces; the prefixes are in tokens of the prompt."""

    order: tuple[int, ...]
    exact_as_given: int
    exact: int

    @property
    def gain(self) -> int:
        """Tokens that the order saves computing; 0 means the given order stays."""
        return self.exact - self.exact_as_given


def propose(pieces: Pieces, known: Prefixes, max_lookups: int = 256) -> Proposal:
    """The order with the longest exact prefix; among equals, the one nearest to the given order.

    A depth-first search that follows a piece only if it and all before it may be known, at about
    one look-up per piece and known order. It stops after `max_lookups` with the best order so far.
    """
    search = _Search(pieces, known, max_lookups)
    given = tuple(range(len(pieces.movable)))
    as_given = known.match_length(pieces.prompt(given))
    search.exact = as_given
    search.extend(pieces.head, (), given)
    order = search.best + tuple(at for at in given if at not in search.best)
    # Tokens behind the best beginning may be known as well, and pages may end in them.
    return Proposal(order, as_given, known.match_length(pieces.prompt(order)))


def confirmed(
    known: Prefixes, proposal: Proposal, as_given: IntArray, proposed: IntArray
) -> Proposal:
    """The proposal with figures of the whole prompts; the given order if that is no worse.

    The pieces were tokenised one by one; in a whole prompt a token may span two of them.
    """
    given, exact = known.match_length(as_given), known.match_length(proposed)
    if exact > given:
        return Proposal(proposal.order, given, exact)
    return Proposal(tuple(range(len(proposal.order))), given, given)


def tokens_within(encode: Callable[[str], Sequence[int]], text: str) -> IntArray:
    """The tokens of `text` where it stands inside a longer one, behind the end of a line.

    `encode` adds no special tokens. Some tokenizers put a space before every text.
    """
    joint, joined = list(encode("\n")), list(encode(f"\n{text}"))
    within = joined[: len(joint)] == joint
    return np.array(joined[len(joint) :] if within else list(encode(text)), np.int32)


class _Search:
    """The best beginning found so far, and how far the search may still go."""

    def __init__(self, pieces: Pieces, known: Prefixes, lookups: int) -> None:
        self.pieces = pieces
        self.known = known
        self.lookups = lookups
        self.best: tuple[int, ...] = ()
        self.exact = 0

    def extend(self, before: IntArray, order: tuple[int, ...], left: tuple[int, ...]) -> None:
        """Try every piece in `left` behind `before`, which is `order`'s prompt so far."""
        if self.lookups < 1:
            return
        if not left:
            # All pieces are placed: the tail may be known, too.
            self._match(np.concatenate([before, self.pieces.tail]), order)
            return
        seen: set[bytes] = set()
        for at in left:
            piece = self.pieces.movable[at]
            # Equal pieces open equal branches.
            if self.lookups < 1 or piece.tobytes() in seen:
                continue
            seen.add(piece.tobytes())
            tokens = np.concatenate([before, piece])
            matched = self._match(tokens, (*order, at))
            if matched >= len(tokens) - self.known.page_size:
                self.extend(tokens, (*order, at), tuple(other for other in left if other != at))

    def _match(self, tokens: IntArray, order: tuple[int, ...]) -> int:
        self.lookups -= 1
        matched = self.known.match_length(tokens)
        if matched > self.exact:
            self.best, self.exact = order, matched
        return matched


class SeenPrompts:
    """The latest prompts, for clients and routers that have no cache at hand."""

    page_size = 1

    def __init__(self, prompts: Iterable[IntArray] = (), most: int = 64) -> None:
        self._prompts: deque[IntArray] = deque(prompts, most)

    def add(self, prompt: IntArray) -> None:
        """Add a prompt that was sent; the oldest one beyond the limit is dropped."""
        self._prompts.append(prompt)

    def match_length(self, tokens: IntArray) -> int:
        return max((_common(tokens, prompt) for prompt in self._prompts), default=0)


class CachedPrefixes:
    """Look-ups in a prefix cache, which change nothing there. On the engine's thread only."""

    def __init__(self, cache: PrefixCache, namespace: Namespace) -> None:
        self.page_size = cache.page_size
        self._cache = cache
        self._namespace = namespace

    def match_length(self, tokens: IntArray) -> int:
        return self._cache.match(RequestView("reorder", tokens, self._namespace))


def _common(first: IntArray, second: IntArray) -> int:
    """The length of the common prefix, by whole-run comparison."""
    shared = min(len(first), len(second))
    different = np.flatnonzero(first[:shared] != second[:shared])
    return int(different[0]) if len(different) else shared
