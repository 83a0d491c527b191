"""Quantised linear layers: the kernels against plain torch, at every level of instruction set."""

from __future__ import annotations

import pytest
import torch

from kvweave import kernels
from kvweave.models.quantized import QuantizedWeight, multiply

LIBRARY = kernels.load()
LEVELS = range(-1 if LIBRARY is None else LIBRARY.level + 1)


def rows(count: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count * inputs)
    x = torch.randn(count, inputs, generator=generator)
    x[0, :32] = 0  # a group without a scale
    return x


def weight(outputs: int, inputs: int, bits: int) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(outputs)
    return QuantizedWeight.of(torch.randn(outputs, inputs, generator=generator), bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_multiplies_as_torch_does(bits: int, level: int) -> None:
    some = weight(100, 96, bits)  # the last tile is not full
    bias = torch.linspace(-3, 3, 100)
    for count in (1, 2, 3, 13, 27, 200):
        x = rows(count, 96)
        expected = multiply(x, some, bias, level=-1)
        found = multiply(x, some, bias, level=level)
        # A float in the last bit of which both differ may be rounded to the next integer.
        assert (found - expected).norm() <= 3e-6 * expected.norm()
        assert (found - x @ some.dequantize().T - bias).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("level", LEVELS)
def test_a_row_gets_the_same_numbers_whatever_else_is_computed(bits: int, level: int) -> None:
    some, x = weight(48, 64, bits), rows(40, 64)
    together = multiply(x, some, level=level)
    for at in (0, 5, 11, 12, 39):
        assert torch.equal(multiply(x[at : at + 1], some, level=level), together[at : at + 1])
    for count in range(1, 40):
        assert torch.equal(multiply(x[:count], some, level=level), together[:count])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(multiply(x, some, level=level), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("level", LEVELS)
def test_the_largest_and_the_smallest_numbers_are_multiplied(bits: int, level: int) -> None:
    """Where all integers of a group have their largest size, and where its scale is tiny."""
    one = torch.linspace(-1, 1, 15).repeat(3)[:32]
    some = QuantizedWeight.of(torch.stack([one.sign() + 0.5, torch.ones(32), -one.abs()]), bits)
    sizes = torch.tensor([1e30, 1.0, 1e-30, 3e-34])[:, None]
    x = torch.cat([sizes * sign for sign in (torch.ones(32), -torch.ones(32), one.sign() + 1e-3)])
    expected = x.double() @ some.dequantize().double().T
    found = multiply(x, some, level=level).double()
    torch.testing.assert_close(found / x.double().abs().amax(1, keepdim=True),
                               expected / x.double().abs().amax(1, keepdim=True),
                               rtol=1e-4, atol=1e-3)  # fmt: skip


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@pytest.mark.parametrize("level", LEVELS)
def test_a_row_that_is_not_a_number_spoils_itself_only(level: int, odd: float) -> None:
    some, x = weight(16, 64, 4), rows(3, 64)
    clean = multiply(x, some, level=level)
    x[1, 40] = odd
    found = multiply(x, some, level=level)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_weight_is_quantised_without_loss(bits: int) -> None:
    once = weight(50, 64, bits)
    again = QuantizedWeight.of(once.dequantize(), bits)
    assert torch.equal(again.dequantize(), once.dequantize())
    at = torch.tensor([49, 0, 17])
    assert torch.equal(once.rows(at), once.dequantize()[at])


def test_parts_of_a_joined_weight_are_views_of_it() -> None:
    parts = [weight(outputs, 64, 4) for outputs in (48, 16, 32)]
    whole = QuantizedWeight.join(parts)
    assert whole is not None
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    views = whole.split([48, 16, 32])
    for view, part in zip(views, parts, strict=True):
        assert torch.equal(view.dequantize(), part.dequantize())
        assert view.values.untyped_storage().data_ptr() == whole.values.untyped_storage().data_ptr()
    assert QuantizedWeight.join([parts[0], weight(16, 64, 8)]) is None
