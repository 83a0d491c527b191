"""Prompt builders keep their overlaps, and the oracle agrees with a slow one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.errors import KvweaveError
from kvweave_bench.workloads import prompts, shapes
from kvweave_bench.workloads.corpus import Corpus
from kvweave_bench.workloads.oracle import shared_positions, shared_share

MakeCorpus = Callable[[int], Corpus]


def slow_positions(prompt: list[int], donors: list[list[int]], min_run: int) -> list[bool]:
    covered = [False] * len(prompt)
    for donor in donors:
        for at in range(len(prompt)):
            for start in range(len(donor)):
                length = 0
                while (
                    at + length < len(prompt)
                    and start + length < len(donor)
                    and prompt[at + length] == donor[start + length]
                ):
                    length += 1
                if length >= min_run:
                    covered[at : at + length] = [True] * length
    return covered


# Three different tokens only: runs of every length, repeats and overlaps are then common.
RUNS = st.lists(st.integers(0, 2), max_size=24)


@settings(max_examples=80, deadline=None)
@given(RUNS, st.lists(RUNS, max_size=3), st.integers(1, 6))
def test_oracle_finds_every_shared_run(
    prompt: list[int], donors: list[list[int]], min_run: int
) -> None:
    found = shared_positions(
        np.asarray(prompt, np.int32), [np.asarray(donor, np.int32) for donor in donors], min_run
    )
    assert found.tolist() == slow_positions(prompt, donors, min_run)


def test_cold_group_shares_exactly_its_head(make_corpus: MakeCorpus) -> None:
    group = prompts.cold_group(make_corpus(1))
    assert [len(prompt) for prompt in group] == [392] * 16
    assert all((prompt[:384] == group[0][:384]).all() for prompt in group)
    assert len({int(prompt[384]) for prompt in group}) == 16


def test_cold_group_looks_on_until_all_tails_begin_differently(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus(1)
    whole = corpus.encode
    corpus.encode = lambda text: [token % 40 for token in whole(text)]
    group = prompts.cold_group(corpus)
    assert len({int(prompt[384]) for prompt in group}) == 16


def test_wrapped_documents_differ_in_length_and_hold_the_document(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus(2)
    document = corpus.take(300)
    wrapped = prompts.wrapped_documents(corpus, document, n=12, room=128)
    assert len({each.start for each in wrapped}) == 12
    for each in wrapped:
        assert (each.tokens[each.start : each.end] == document).all()
        assert 300 < len(each.tokens) <= 300 + 128


def test_too_many_wrappers_end_in_words(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus(2)
    with pytest.raises(KvweaveError, match="different lengths"):
        prompts.wrapped_documents(corpus, corpus.take(10), n=500, room=128)


def test_a_corpus_never_hands_out_a_token_twice_and_says_when_it_ends(
    make_corpus: MakeCorpus,
) -> None:
    corpus = make_corpus(3)
    first, second = corpus.take(15_000), corpus.take(15_000)
    assert shared_share(first, [second]) == 0
    with pytest.raises(KvweaveError, match="smaller --n"):
        corpus.take(15_000)


@pytest.mark.parametrize("name", ["edited", "near-duplicate"])
def test_successive_cases_have_other_texts(make_corpus: MakeCorpus, name: str) -> None:
    corpus = make_corpus(3)
    first, second = (shapes.SHAPES[name](corpus, 600) for _ in range(2))
    assert shared_share(second.donors[0], first.donors) == 0


def test_texts_that_are_used_up_end_in_words(make_corpus: MakeCorpus) -> None:
    with pytest.raises(KvweaveError, match="all texts of countries: give a smaller --n"):
        make_corpus(3).passages("countries", 61)


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_same_seed_same_case(make_corpus: MakeCorpus, name: str) -> None:
    first, again, other = (shapes.SHAPES[name](make_corpus(seed), 600) for seed in (5, 5, 6))
    assert first.recipient.tolist() == again.recipient.tolist()
    assert [donor.tolist() for donor in first.donors] == [d.tolist() for d in again.donors]
    assert first.recipient.tolist() != other.recipient.tolist()


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("new-wrapper", 0.7, 0.99),
        ("edited", 0.7, 0.99),
        ("reordered-4", 0.7, 0.99),
        ("reordered-16", 0.7, 0.99),
        ("three-donors", 0.7, 0.99),
        ("shared-35", 0.25, 0.45),
        ("subset", 0.7, 0.99),
        ("unrelated", 0.0, 0.0),
        ("near-duplicate", 0.3, 0.95),
    ],
)
def test_shapes_share_what_they_say(
    make_corpus: MakeCorpus, name: str, least: float, most: float
) -> None:
    case = shapes.SHAPES[name](make_corpus(4), 1000)
    assert least <= shared_share(case.recipient, case.donors) <= most
    assert 700 <= len(case.recipient) <= 1400


def test_reordered_blocks_have_no_old_neighbours(make_corpus: MakeCorpus) -> None:
    case = shapes.SHAPES["reordered-16"](make_corpus(8), 16 * 40)
    # A run longer than one block would mean that two neighbours stayed together.
    assert shared_share(case.recipient, case.donors, min_run=64) == 0


def test_three_donors_all_take_part(make_corpus: MakeCorpus) -> None:
    case = shapes.SHAPES["three-donors"](make_corpus(9), 900)
    shares = [shared_share(case.recipient, [donor]) for donor in case.donors]
    assert len(shares) == 3
    assert all(0.2 < share < 0.45 for share in shares)


def test_near_duplicates_change_every_passage(make_corpus: MakeCorpus) -> None:
    case = shapes.SHAPES["near-duplicate"](make_corpus(10), 1000)
    # Changes fall into the last 15 of up to 55 words: a passage left alone would share 80 or more.
    assert shared_share(case.recipient, case.donors, min_run=72) == 0
