"""The pool's tensors: pages copied out and in as bytes, and numbers kept as int8."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvweave import kernels
from kvweave.errors import IntegrityError
from kvweave.kv.layout import LayerLayout
from kvweave.kv.tensors import KVTensors, quantize

LAYOUTS = (LayerLayout(3, 64, 64), LayerLayout(1, 24, 40))
TYPES = tuple(kernels.NUMBER_TYPES)


def filled(dtype: torch.dtype, page_size: int, seed: int, *, native: bool = True) -> KVTensors:
    """Every slot written, with numbers of very different sizes."""
    kv = KVTensors(LAYOUTS, 6, page_size, dtype=dtype, native=native)
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(kv.num_slots, generator=generator)
    for layer, at in enumerate(LAYOUTS):
        size = torch.rand(len(slots), at.num_kv_heads, 1, generator=generator).mul(8).exp()
        key = torch.randn(len(slots), at.num_kv_heads, at.key_dim, generator=generator) * size
        value = torch.randn(len(slots), at.num_kv_heads, at.value_dim, generator=generator) * size
        kv.write(layer, slots, key, value)
    return kv


def contents(kv: KVTensors, pages: np.ndarray) -> list[torch.Tensor]:
    slots = torch.from_numpy(pages[:, None] * kv.page_size + np.arange(kv.page_size)).long()
    return [
        read(layer, slots)
        for layer in range(len(LAYOUTS))
        for read in (kv.read_keys, kv.read_values)
    ]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("native", [True, False])
def test_pages_copied_out_and_into_another_pool_are_the_same(
    dtype: torch.dtype, page_size: int, native: bool
) -> None:
    kv, other = filled(dtype, page_size, 1), filled(dtype, page_size, 2, native=native)
    pages, targets = np.array([4, 1, 2], np.int32), np.array([0, 5, 3], np.int32)
    data = kv.copy_out(pages)
    assert data.shape == (3, kv.page_bytes)
    plain = filled(dtype, page_size, 1, native=False)
    assert np.array_equal(plain.copy_out(pages), data)
    untouched = contents(other, np.array([1, 2, 4], np.int32))
    data.flags.writeable = False  # as a mapped file's
    with pytest.raises(IndexError):
        other.copy_in(np.array([6, 5, 3], np.int32), data)
    other.copy_in(targets, data)
    for got, want in zip(contents(other, targets), contents(kv, pages), strict=True):
        assert torch.equal(got, want)
    for got, want in zip(contents(other, np.array([1, 2, 4], np.int32)), untouched, strict=True):
        assert torch.equal(got, want)


def test_pages_of_another_size_are_refused_before_anything_is_written() -> None:
    kv = filled(torch.int8, 16, 1)
    pages = np.array([0, 1], np.int32)
    before = kv.copy_out(pages)
    with pytest.raises(IntegrityError, match="bytes each"):
        kv.copy_in(pages, before[:, :-1])
    assert np.array_equal(kv.copy_out(pages), before)


def test_int8_is_within_half_a_step_of_what_was_written() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(50, 3, 64, generator=generator) * torch.logspace(-6, 6, 50)[:, None, None]
    for group in (32, 40, 64):
        integers, scales = quantize(numbers, group)
        each = scales.repeat_interleave(group, -1)[..., :64]
        assert bool(((integers * each - numbers).abs() <= each * 0.5001).all())
        for part in integers.split(group, -1):
            assert bool((part.abs().amax(-1) == 127).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_quantises_as_plain_torch_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    library = kernels.load()
    assert library is not None, "the kernels were not built, so they cannot be tested"
    for dim in (5, 8, 40, 64, 100):
        layout = LayerLayout(3, dim, dim)
        slots = torch.randperm(64, generator=generator)[:50]
        numbers = torch.randn(50, 3, dim, generator=generator).mul(9).exp().to(dtype)
        numbers[0], numbers[1, 0, 2], numbers[2, 0, dim - 1] = 0, torch.nan, -torch.inf
        plain = KVTensors([layout], 4, 16, dtype=torch.int8, native=False)
        plain.write(0, slots, numbers, -numbers)
        for level in range(library.level + 1):
            kv = KVTensors([layout], 4, 16, dtype=torch.int8, level=level)
            kv.write(0, slots, numbers, -numbers)
            for read in (kv.read_keys, kv.read_values):
                assert not read(0, slots[1]).isfinite()[0].all()
                assert not read(0, slots[2]).isfinite()[0].all()
            good = slots[torch.arange(50) > 2]
            assert torch.equal(kv.key_scales[0][good], plain.key_scales[0][good])
            for got, want in ((kv.keys[0], plain.keys[0]), (kv.values[0], plain.values[0])):
                apart = (got[good].int() - want[good].int()).abs()
                # Halves may go either way: some processors round the product only once.
                assert int(apart.max()) <= 1
                assert apart.float().mean() < 0.01
                assert torch.equal(got[slots[0]], want[slots[0]])


def test_int8_keeps_zeros_and_hides_nothing() -> None:
    numbers = torch.zeros(4, 8)
    numbers[1, 3], numbers[2, 3], numbers[3, 3] = torch.nan, torch.inf, 1e-38
    integers, scales = quantize(numbers, 8)
    kept = integers.float() * scales
    assert torch.equal(kept[0], numbers[0])
    assert not kept[1].isfinite().any()
    assert not kept[2].isfinite().all()
    assert kept[3].abs().max() <= 1e-38


def test_int8_holds_three_and_a_half_times_the_tokens_of_float32() -> None:
    layouts = (LayerLayout(3, 64, 64),) * 30
    wide, narrow = (
        KVTensors.bytes_per_slot(layouts, dtype) for dtype in (torch.float32, torch.int8)
    )
    assert wide >= 3.5 * narrow
    kv = KVTensors(LAYOUTS, 3, 16, dtype=torch.int8)
    held = sum(each.nbytes for each in (*kv.keys, *kv.values, *kv.key_scales, *kv.value_scales))
    assert held == 3 * kv.page_bytes
