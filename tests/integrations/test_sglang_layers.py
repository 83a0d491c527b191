"""Rotations found by running attention modules alone, written as SGLang writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import support.fake_sglang as fake
from kvweave.errors import UnsupportedModelError
from kvweave.kv.relocation import relocate

pytestmark = pytest.mark.usefixtures("sglang")

HEADS, DIM, HIDDEN, CONTEXT = 2, 16, 12, 4096


class Rope(torch.nn.Module):
    """As SGLang's RotaryEmbedding: sines and cosines by position, halves or interleaved pairs."""

    def __init__(self, dim: int = DIM, *, halves: bool = True, scale: float = 1.0) -> None:
        super().__init__()
        self.dim, self.halves, self.scale = dim, halves, scale
        self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache(), persistent=False)

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        frequencies = 1 / 10_000 ** (torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.arange(CONTEXT)[:, None] * frequencies
        return torch.cat([angles.cos(), angles.sin()], -1) * self.scale

    def forward(self, positions: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        cosine, sine = self.rows(positions)[:, None].chunk(2, -1)
        turned, rest = key[..., : self.dim], key[..., self.dim :]
        if self.halves:
            a, b = turned.chunk(2, -1)
            return torch.cat([a * cosine - b * sine, b * cosine + a * sine, rest], -1)
        a, b = turned[..., ::2], turned[..., 1::2]
        pairs = torch.stack([a * cosine - b * sine, b * cosine + a * sine], -1)
        return torch.cat([pairs.flatten(-2), rest], -1)

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        return self.cos_sin_cache[positions]


class LongRope(Rope):
    """Other frequencies for all positions once one of them is far."""

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        return self.cos_sin_cache[positions // 2 if positions.max() > 2000 else positions]


class Attention(torch.nn.Module):
    def __init__(self, rope: Any, layer: int = 0) -> None:
        super().__init__()
        self.rotary_emb = rope
        self.project = torch.nn.Linear(HIDDEN, 2 * HEADS * DIM)
        self.attn = fake.RadixAttention(layer, HEADS, DIM)

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any) -> Any:
        key, value = self.project(hidden_states).view(-1, 2, HEADS, DIM).unbind(1)
        return self.attend(self.turned(positions, key), value, forward_batch)

    def turned(self, positions: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key if self.rotary_emb is None else self.rotary_emb(positions, key)

    def attend(self, key: torch.Tensor, value: torch.Tensor, forward_batch: Any) -> Any:
        return self.attn(key, key.flatten(1), value.flatten(1), forward_batch)


class AddsPosition(Attention):
    def turned(self, positions: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key + positions[:, None, None] / 100


class NeedsMore(Attention):
    def attend(self, key: torch.Tensor, value: torch.Tensor, forward_batch: Any) -> Any:
        return forward_batch.out_cache_loc


def _inspect(*attentions: torch.nn.Module) -> Any:
    from kvweave.integrations.sglang.layers import inspect_layers

    return inspect_layers(
        torch.nn.ModuleList(attentions),
        range(len(attentions)),
        hidden_size=HIDDEN,
        context_length=CONTEXT,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(
    "rope",
    [Rope(), Rope(halves=False), Rope(DIM // 2), Rope(DIM // 2, halves=False), Rope(scale=1.3)],
    ids=["halves", "interleaved", "partial", "partial interleaved", "scaled"],
)
def test_the_rotation_is_found_and_moves_keys(rope: Rope) -> None:
    [layout] = _inspect(Attention(rope))
    key = torch.randn(1, HEADS, DIM)
    here, there = (rope(torch.tensor([at]), key) for at in (700, 40))
    torch.testing.assert_close(relocate(here, layout.rotary, -660), there, atol=1e-3, rtol=1e-3)


def test_every_layer_has_its_own() -> None:
    turned, plain = _inspect(Attention(Rope()), Attention(None, 1))
    assert len(turned.rotary.inv_freq) == DIM // 2
    assert np.size(plain.rotary.inv_freq) == 0


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (LongRope, "frequencies depend on the length"),
        (AddsPosition, "otherwise than by a known rotation"),
        (NeedsMore, "NeedsMore cannot be run outside of a forward pass"),
    ],
)
def test_what_is_no_fixed_rotation_is_refused(attention: Any, words: str) -> None:
    module = Attention(LongRope()) if attention is LongRope else attention(Rope())
    with pytest.raises(UnsupportedModelError, match=f"layer 0 of this model: .*{words}"):
        _inspect(module)


def test_attention_works_again_after_the_trial() -> None:
    attention = Attention(Rope())
    _inspect(attention)
    with pytest.raises(AssertionError, match="nothing attends when a layer is run alone"):
        attention(torch.tensor([0]), torch.randn(1, HIDDEN), None)
