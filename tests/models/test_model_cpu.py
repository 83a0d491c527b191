"""Packed weights and kept memory on a CPU change no answer."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from kvweave.models import cpu


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_multiplies_like_the_plain_one(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 80, bias=bias, dtype=dtype).requires_grad_(False)
    packed = cpu.PackedLinear(linear)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for shape in ((1, 1, 96), (1, 33, 96), (7, 96), (1, 0, 96)):
        x = torch.randn(shape).to(dtype)
        found = packed(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found, linear(x), rtol=tolerance, atol=tolerance)
    assert torch.equal(packed.weight, linear.weight)


class _Own(nn.Linear):
    """A linear layer with a mind of its own."""


def test_only_plain_linear_layers_are_packed() -> None:
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16), _Own(16, 16))
    model.add_module("inner", nn.Sequential(nn.Linear(16, 4), nn.LayerNorm(4)))
    model.requires_grad_(False)
    ids = torch.arange(10)
    before = model(ids)
    assert cpu.pack_weights(model) == 2
    assert type(model[1]) is cpu.PackedLinear
    assert type(model[2]) is _Own
    torch.testing.assert_close(model(ids), before)
    assert cpu.pack_weights(model) == 0


def test_nothing_is_packed_where_packing_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: cpu.PackedLinear, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], self.out_features)

    def missing(self: cpu.PackedLinear, x: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operator")

    for broken in (wrong, missing):
        monkeypatch.setattr(cpu.PackedLinear, "forward", broken)
        model = nn.Sequential(nn.Linear(16, 16))
        assert cpu.pack_weights(model) == 0
        assert type(model[0]) is nn.Linear


def test_freed_memory_is_kept_with_glibc_and_only_there() -> None:
    assert cpu.keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


@pytest.fixture
def measured() -> Iterator[None]:
    """Forgets what this process has measured, before and after."""
    cpu.faster_dtype.cache_clear()
    yield
    cpu.faster_dtype.cache_clear()


@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "speedups", "expected"),
    [
        (False, False, [9.0, 9.0], torch.float32),
        (True, False, [1.9, 8.0], torch.bfloat16),
        (False, True, [1.5, 1.2], torch.bfloat16),
        (True, True, [3.0, 1.05], torch.float32),  # slower, or as good as, for many rows
    ],
)
@pytest.mark.usefixtures("measured")
def test_the_processor_and_a_measurement_choose_the_number_type(
    monkeypatch: pytest.MonkeyPatch,
    amx: bool,
    avx512_bf16: bool,
    speedups: list[float],
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(cpu, "_speedups", lambda: speedups)
    dtype, because = cpu.faster_dtype()
    assert dtype == expected
    if amx or avx512_bf16:
        assert f"{min(speedups):.1f} times" in because
        assert ("AMX" if amx else "AVX512-BF16") in because
    else:
        assert "no products of bfloat16" in because


def test_what_is_measured_are_ratios() -> None:
    found = cpu._speedups()
    assert len(found) == 2
    assert all(0 < each < 1000 for each in found)
