import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.fuzzy.anchors import block_hashes, window_hashes

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
