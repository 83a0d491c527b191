"""Proposed orders: as good as the best of all orders, never worse than the given one, bounded."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.kv.pool import IntArray, PagePool
from kvweave.prefix.base import create_cache
from kvweave.prefix.contract import CacheOptions, PrefixCache
from kvweave.prefix.lease import Namespace, RequestView
from kvweave.reorder import (
    CachedPrefixes,
    Pieces,
    Proposal,
    SeenPrompts,
    confirmed,
    propose,
    tokens_within,
)

HEAD, TAIL = np.array([1, 2], np.int32), np.array([3], np.int32)


def piece(start: int, length: int) -> IntArray:
    return np.arange(start, start + length, dtype=np.int32)


def pieces_of(*movable: IntArray) -> Pieces:
    return Pieces(HEAD, movable, TAIL)


# Few distinct tokens: pieces that begin alike, repeat, or are empty are what a search gets wrong.
token_runs = st.lists(st.integers(10, 12), max_size=4).map(lambda ids: np.array(ids, np.int32))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_order_has_a_longer_prefix_and_the_promise_is_kept(data: st.DataObject) -> None:
    movable = data.draw(st.lists(token_runs, min_size=1, max_size=4))
    pieces = pieces_of(*movable)
    orders = list(permutations(range(len(movable))))
    earlier = data.draw(st.lists(st.sampled_from(orders), max_size=3))
    cut = data.draw(st.integers(0, 4))
    known = SeenPrompts(
        [pieces.prompt(order)[: len(pieces.prompt(order)) - cut] for order in earlier]
    )
    proposal = propose(pieces, known, max_lookups=1000)
    best = max(known.match_length(pieces.prompt(order)) for order in orders)
    assert sorted(proposal.order) == list(range(len(movable)))
    assert proposal.exact == known.match_length(pieces.prompt(proposal.order)) == best
    assert proposal.exact_as_given == known.match_length(pieces.prompt(orders[0]))
    if not proposal.gain:
        assert proposal.order == orders[0]


def test_known_beginning_comes_first_and_the_rest_keeps_its_order() -> None:
    a, b, c, d = (piece(100 * n, 20) for n in range(1, 5))
    known = SeenPrompts([np.concatenate([HEAD, c, a, piece(900, 20)])])
    proposal = propose(pieces_of(a, b, c, d), known)
    assert proposal.order == (2, 0, 1, 3)
    assert (proposal.exact_as_given, proposal.exact, proposal.gain) == (2, 42, 40)


def test_nothing_known_changes_nothing() -> None:
    proposal = propose(pieces_of(piece(10, 5), piece(20, 5)), SeenPrompts())
    assert (proposal.order, proposal.gain) == ((0, 1), 0)


def radix(page_size: int) -> PrefixCache:
    return create_cache("radix", PagePool(64, page_size), CacheOptions())


def keep(cache: PrefixCache, tokens: IntArray, namespace: Namespace) -> None:
    lease = cache.lease(RequestView("earlier", tokens, namespace))
    assert cache.grow(lease, len(tokens))
    cache.publish(lease, tokens, len(tokens))
    cache.release(lease)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [16, 19])
def test_a_real_cache_is_asked_in_pages_and_left_as_it_is(page_size: int, length: int) -> None:
    a, b, c = (piece(100 * n, length) for n in range(1, 4))
    cache, mine = radix(page_size), Namespace("model")
    pieces = pieces_of(a, b, c)
    keep(cache, pieces.prompt((1, 2, 0)), mine)
    before = cache.cached_pages
    proposal = propose(pieces, CachedPrefixes(cache, mine))
    assert proposal.order == (1, 2, 0)
    assert proposal.exact == (len(pieces.prompt((0, 1, 2))) - 1) // page_size * page_size
    assert cache.cached_pages == before
    other = propose(pieces, CachedPrefixes(cache, Namespace("model", salt="theirs")))
    assert other.gain == 0


class Counting:
    """Knows every order, which is what a search could get lost in."""

    page_size = 1

    def __init__(self) -> None:
        self.asked = 0

    def match_length(self, tokens: IntArray) -> int:
        self.asked += 1
        return len(tokens) - 1


def test_the_search_is_bounded() -> None:
    known = Counting()
    proposal = propose(pieces_of(*(piece(100 * n, 8) for n in range(1, 12))), known, 50)
    assert known.asked <= 52
    assert proposal.order == tuple(range(11))


def test_the_tail_decides_between_orders_that_are_known_to_the_end() -> None:
    pieces = pieces_of(piece(100, 4), piece(200, 4))
    elsewhere = Pieces(HEAD, pieces.movable, piece(900, 3))
    proposal = propose(pieces, SeenPrompts([elsewhere.prompt((0, 1)), pieces.prompt((1, 0))]))
    assert (proposal.order, proposal.gain) == ((1, 0), len(TAIL))


def test_equal_pieces_are_looked_up_once() -> None:
    known = Counting()
    propose(pieces_of(*(piece(100, 8) for _ in range(11))), known, 50)
    assert known.asked <= 15


def test_seen_prompts_forgets_the_oldest() -> None:
    seen = SeenPrompts(most=2)
    for start in (10, 20, 30):
        seen.add(piece(start, 4))
    assert [seen.match_length(piece(start, 4)) for start in (10, 20, 30)] == [0, 4, 4]


def test_the_whole_prompts_decide() -> None:
    given, proposed = piece(100, 20), piece(200, 20)
    promise = Proposal((1, 0), 0, 20)
    kept = confirmed(SeenPrompts([proposed[:15], given[:4]]), promise, given, proposed)
    assert kept == Proposal((1, 0), 4, 15)
    broken = confirmed(SeenPrompts([given[:4]]), promise, given, proposed)
    assert broken == Proposal((0, 1), 4, 4)
    assert not broken.gain


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a b", ["a", "_", "b"]),
        ("a\n", ["a", "\n"]),
        ("\na", ["_", "\n", "a"]),  # two line ends are one token: it is read on its own
        ("", []),
    ],
)
def test_pieces_have_no_space_before_them_that_the_whole_text_has_not(
    text: str, tokens: list[str]
) -> None:
    def encode(text: str) -> list[int]:
        """Puts a space before everything, and knows a token of two line ends."""
        return [ord(each) for each in f" {text}".replace(" ", "_").replace("\n\n", "\f")]

    assert tokens_within(encode, text).tolist() == [ord(each) for each in tokens]
    assert tokens_within(encode, text).dtype == np.int32
