"""Relocation: a key turned from p to q is the key that would have been computed at q."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.kv.layout import Rotary
from kvweave.kv.relocation import relocate, turn


def llama3_scaled(inv_freq: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Low frequencies slowed down eightfold, high ones kept: what scaled models do to them."""
    return np.where(inv_freq < 0.01, inv_freq / 8, inv_freq)


def frequencies(pairs: int, base: float = 10_000.0) -> npt.NDArray[np.float64]:
    return base ** -(np.arange(pairs) / pairs)


ROTARIES = {
    "half": Rotary(frequencies(16)),
    "interleaved": Rotary(frequencies(16), interleaved=True),
    "partial": Rotary(frequencies(5)),
    "partial interleaved": Rotary(frequencies(4), interleaved=True),
    "behind a part without position": Rotary(frequencies(8), offset=16),
    "interleaved behind it": Rotary(frequencies(8), interleaved=True, offset=16),
    "scaled": Rotary(llama3_scaled(frequencies(16, 500_000.0))),
}
DIM = 32


def rotated_at(plain: npt.NDArray[np.float64], rotary: Rotary, at: int) -> npt.NDArray[np.float64]:
    """The key at position `at`, by complex numbers in float64: not how kvweave does it."""
    count = len(rotary.inv_freq)
    if rotary.interleaved:
        first = rotary.offset + 2 * np.arange(count)
        second = first + 1
    else:
        first = rotary.offset + np.arange(count)
        second = first + count
    turned = (plain[..., first] + 1j * plain[..., second]) * np.exp(1j * at * rotary.inv_freq)
    key = plain.copy()
    key[..., first], key[..., second] = turned.real, turned.imag
    return key


def keys(seed: int = 0) -> npt.NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=(7, 2, DIM))


def as_tensor(array: npt.NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy(array).float()


@pytest.mark.parametrize("name", ROTARIES)
@settings(deadline=None, max_examples=25)
@given(p=st.integers(0, 1_000_000), q=st.integers(0, 1_000_000))
def test_moving_equals_computing_at_the_target(name: str, p: int, q: int) -> None:
    rotary = ROTARIES[name]
    moved = relocate(as_tensor(rotated_at(keys(), rotary, p)), rotary, q - p)
    torch.testing.assert_close(
        moved, as_tensor(rotated_at(keys(), rotary, q)), atol=2e-6, rtol=1e-6
    )


@pytest.mark.parametrize("name", ROTARIES)
def test_there_and_back_is_nothing(name: str) -> None:
    rotary, start = ROTARIES[name], as_tensor(keys())
    moved = relocate(start, rotary, 1234)
    torch.testing.assert_close(relocate(moved, rotary, -1234), start, atol=1e-6, rtol=1e-6)
    # The guard: a rotation that does nothing would pass as well.
    rotated = slice(rotary.offset, rotary.offset + 2 * len(rotary.inv_freq))
    assert ((moved - start)[..., rotated].abs() > 1e-4).float().mean() > 0.9
    rest = torch.ones(DIM, dtype=torch.bool)
    rest[rotated] = False
    assert torch.equal(moved[..., rest], start[..., rest])


@pytest.mark.parametrize("name", ROTARIES)
def test_two_moves_make_one(name: str) -> None:
    rotary, start = ROTARIES[name], as_tensor(keys())
    twice = relocate(relocate(start, rotary, 90), rotary, -31)
    torch.testing.assert_close(twice, relocate(start, rotary, 59), atol=1e-6, rtol=1e-6)


def test_no_move_changes_no_bit() -> None:
    for rotary in ROTARIES.values():
        assert torch.equal(relocate(as_tensor(keys()), rotary, 0), as_tensor(keys()))


def test_a_layer_without_position_is_copied() -> None:
    for interleaved in (False, True):
        none = Rotary(np.zeros(0), interleaved=interleaved)
        assert torch.equal(relocate(as_tensor(keys()), none, 77), as_tensor(keys()))


def test_bfloat16_is_rounded_once() -> None:
    rotary = ROTARIES["half"]
    start = as_tensor(keys()).bfloat16()
    exact = relocate(start.float(), rotary, 4321)
    assert torch.equal(relocate(start, rotary, 4321), exact.bfloat16())


def test_angles_are_exact_after_a_million_positions() -> None:
    """In float32, a million times the highest frequency is known to a sixteenth of a radian."""
    factors = turn(Rotary(np.array([0.9999999])), 999_983)
    angle = 999_983 * 0.9999999
    assert abs(factors[0, 0] - np.cos(angle)) < 1e-7
    assert abs(factors[1, 1] - np.sin(angle)) < 1e-7
