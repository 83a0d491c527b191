"""Rotations found by running attention modules alone, written as SGLang writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import support.fake_sglang as fake
from kvweave.errors import UnsupportedModelError

pytestmark = pytest.mark.usefixtures("sglang")

HEADS, DIM, HIDDEN, CONTEXT = 2, 16, 12, 4096


class LongRope(fake.RotaryEmbedding):
    """Other frequencies for all positions once one of them is far."""

    def row_of(self, positions: torch.Tensor) -> torch.Tensor:
        return positions // 2 if positions.max() > 2000 else positions


class ShortRope(fake.RotaryEmbedding):
    """All positions behind its table's end are turned alike."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.cos_sin_cache = self.cos_sin_cache[:2000]

    def row_of(self, positions: torch.Tensor) -> torch.Tensor:
        return positions.clamp(max=1999)


class LastRowFirst(fake.RotaryEmbedding):
    """Turns keys as others do, but the row of a position is not where others have it."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.cos_sin_cache = self.cos_sin_cache.flip(0)

    def row_of(self, positions: torch.Tensor) -> torch.Tensor:
        return 4095 - positions


class Backwards(fake.RotaryEmbedding):
    """Turns keys the other way round."""

    def forward(self, positions: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return super().forward_native(positions, key * FLIPPED) * FLIPPED


FLIPPED = torch.tensor([1.0] * (DIM // 2) + [-1.0] * (DIM // 2))
"""Complex conjugation of halves."""


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


ROPES = {
    "halves": fake.RotaryEmbedding(DIM),
    "interleaved": fake.RotaryEmbedding(DIM, halves=False),
    "partial": fake.RotaryEmbedding(DIM // 2),
    "partial interleaved": fake.RotaryEmbedding(DIM // 2, halves=False),
    "scaled": fake.RotaryEmbedding(DIM, scale=1.3),
    "backwards": Backwards(DIM),
}


@pytest.mark.parametrize("name", ROPES)
def test_keys_are_moved_by_the_table_that_turned_them(name: str) -> None:
    """As far as float32 goes. Angles in float64 would be off by the table's own error: 1e-4."""
    from kvweave.integrations.sglang.layers import PoolMover, SlotRun

    rope, (slots, far) = ROPES[name], (40, 3900)
    pool = fake.MHATokenToKVPool(2 * slots, 1, 1, HEADS, DIM)
    plain, value = torch.randn(2, slots, HEADS, DIM).unbind()
    pool.k_buffer[0][:slots] = rope(torch.arange(far, far + slots), plain)
    pool.v_buffer[0][:slots] = value
    mover = PoolMover(pool, _inspect(Attention(rope)), None)
    here, there = torch.arange(slots), torch.arange(slots, 2 * slots)
    mover.move([SlotRun(here[:9], there[:9], far, 7), SlotRun(here[9:], there[9:], far + 9, 90)])
    expected = rope(torch.cat([torch.arange(7, 16), torch.arange(90, 121)]), plain)
    torch.testing.assert_close(pool.k_buffer[0][there], expected, atol=2e-6, rtol=2e-6)
    assert torch.equal(pool.v_buffer[0][there], value)


def test_a_table_in_bfloat16_moves_keys_as_exactly() -> None:
    """Where SGLang rounds its table, its own rounding is in every key; a quotient has it, too."""
    from kvweave.integrations.sglang.layers import RotaryTable
    from kvweave.kv.layout import Rotary
    from kvweave.kv.relocation import turned

    rope = fake.RotaryEmbedding(DIM).bfloat16()
    key, positions = torch.randn(3, HEADS, DIM), torch.tensor([5, 600, 4000])
    moved = turned(
        rope(positions, key),
        Rotary(np.ones(DIM // 2)),
        *RotaryTable(rope, backwards=False).between(positions, positions.flip(0)),
    )
    torch.testing.assert_close(moved, rope(positions.flip(0), key), atol=2e-6, rtol=2e-6)


def test_a_table_that_sglang_replaced_is_read_anew() -> None:
    from kvweave.integrations.sglang.layers import RotaryTable

    rope = fake.RotaryEmbedding(DIM)
    table, (here, there) = RotaryTable(rope, backwards=False), torch.tensor([[3], [9]])
    before, _ = table.between(here, there)
    rope.cos_sin_cache = rope.cos_sin_cache.repeat_interleave(2, 0)
    after, _ = table.between(here, there)
    assert not torch.equal(before, after)


def test_every_layer_has_its_own() -> None:
    rope = fake.RotaryEmbedding(DIM)
    turning, plain = _inspect(Attention(rope), Attention(None, 1))
    assert turning.table.embedding is rope
    assert plain.table is None


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (LongRope, "frequencies depend on the length"),
        (ShortRope, "ends after 2000 positions, and prompts may have 4096"),
        (LastRowFirst, "table of cosines and sines does not turn them"),
        (AddsPosition, "otherwise than by a known rotation"),
        (NeedsMore, "NeedsMore cannot be run outside of a forward pass"),
    ],
)
def test_what_is_no_fixed_rotation_is_refused(attention: Any, words: str) -> None:
    is_rope = issubclass(attention, fake.RotaryEmbedding)
    module = Attention(attention(DIM)) if is_rope else attention(fake.RotaryEmbedding(DIM))
    with pytest.raises(UnsupportedModelError, match=f"layer 0 of this model: .*{words}"):
        _inspect(module)


def test_attention_works_again_after_the_trial() -> None:
    attention = Attention(fake.RotaryEmbedding(DIM))
    _inspect(attention)
    with pytest.raises(AssertionError, match="nothing attends when a layer is run alone"):
        attention(torch.tensor([0]), torch.randn(1, HIDDEN), None)
