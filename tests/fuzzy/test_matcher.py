"""Tests of the matcher: hashes of windows, anchors, and runs shared with another text."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.fuzzy.matcher import TextIndex, anchors_of, block_hashes, window_hashes
from kvweave_bench.workloads.oracle import shared_positions

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=80).map(lambda t: np.array(t, np.int32))


@given(TOKENS, st.integers(1, 20))
def test_a_window_has_one_hash_wherever_it_stands(tokens: np.ndarray, width: int) -> None:
    hashes = window_hashes(tokens, width, 7)
    assert len(hashes) == max(0, len(tokens) - width + 1)
    for at, expected in enumerate(hashes.tolist()):
        assert window_hashes(tokens[at : at + width], width, 7).tolist() == [expected]


@given(TOKENS, st.integers(1, 20))
def test_blocks_are_every_width_th_window(tokens: np.ndarray, width: int) -> None:
    expected = window_hashes(tokens, width, 7)[::width]
    assert np.array_equal(block_hashes(tokens, width, 7), expected[: len(tokens) // width])


def test_windows_of_other_tokens_order_or_namespace_hash_differently() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, 200_000).astype(np.int32)  # few tokens: neighbours much alike
    windows = np.lib.stride_tricks.sliding_window_view(tokens, 16)
    different = len(np.unique(windows, axis=0))
    assert len(np.unique(window_hashes(tokens, 16, 7))) == different
    assert not np.isin(window_hashes(tokens, 16, 7), window_hashes(tokens, 16, 8)).any()


@pytest.mark.parametrize("shift", [0, 32, 54])
def test_every_part_of_a_hash_is_spread(shift: int) -> None:
    """Ten bits from anywhere in the hash of near-equal windows fill 1024 buckets evenly."""
    rows = np.tile(np.arange(16, dtype=np.int32), (50_000, 1))
    rows[:, 7] = np.arange(50_000)
    hashes = block_hashes(rows.ravel(), 16, 0)
    counts = np.bincount((hashes >> np.uint64(shift)).astype(np.int64) % 1024, minlength=1024)
    expected = len(hashes) / 1024
    assert ((counts - expected) ** 2 / expected).sum() < 1024 + 6 * np.sqrt(2 * 1024)


@given(TOKENS, st.integers(1, 9), st.lists(st.integers(1, 30), max_size=5))
def test_a_text_published_in_parts_has_the_anchors_of_the_whole(
    tokens: np.ndarray, stride: int, parts: list[int]
) -> None:
    hashes, ends = anchors_of(tokens, 0, 0, stride, 7)
    assert ends.tolist() == list(range(stride - 1, len(tokens), stride))
    found: list[tuple[int, int]] = []
    edges = [0, *np.minimum(np.cumsum(parts), len(tokens)).tolist(), len(tokens)]
    for begin, end in pairwise(edges):
        start = max(0, begin - stride + 1)  # the fewest tokens before that are sure to do
        new = anchors_of(tokens[start:end], start, begin, stride, 7)
        found += zip(new[0].tolist(), new[1].tolist(), strict=True)
    assert found == list(zip(hashes.tolist(), ends.tolist(), strict=True))


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(2, 40), st.data())
def test_every_long_run_in_another_text_is_found(
    seed: int, stride: int, vocabulary: int, data: st.DataObject
) -> None:
    """Also among repetitions, of which few tokens make many; never a token that differs."""
    rng = np.random.default_rng(seed)
    donor = rng.integers(0, vocabulary, data.draw(st.integers(0, 120))).astype(np.int32)
    prompt = rng.integers(0, vocabulary, data.draw(st.integers(0, 120))).astype(np.int32)
    for _ in range(data.draw(st.integers(0, 3))):
        size = int(rng.integers(0, min(len(donor), len(prompt)) + 1))
        here, there = (int(rng.integers(0, len(text) - size + 1)) for text in (prompt, donor))
        prompt[here : here + size] = donor[there : there + size]
    covered = np.zeros(len(prompt), np.bool_)
    for run in TextIndex(donor, stride, 7).runs(prompt, window_hashes(prompt, stride, 7), 60):
        here, there = run.start, run.donor_start
        assert np.array_equal(prompt[here : here + run.length], donor[there : there + run.length])
        covered[here : here + run.length] = True
    if vocabulary > 30:  # with fewer, one anchor has more places than are tried
        wanted = shared_positions(prompt, [donor], 2 * stride - 1)
        assert not (wanted & ~covered).any()


def test_only_a_part_of_a_text_may_have_anchors() -> None:
    donor = np.arange(100, dtype=np.int32)
    index = TextIndex(donor, 4, 7, begin=60)
    assert index.runs(donor[:55], window_hashes(donor[:55], 4, 7), 60) == []
    [run] = index.runs(donor[20:70], window_hashes(donor[20:70], 4, 7), 60)
    assert run == (0, 50, 20)
