"""Inspection: layouts of known models, and rotations that move keys correctly."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import masking_utils

from kvweave.config import ModelConfig
from kvweave.kv.layout import Rotary
from kvweave.models import LoadedModel, hooks, load_model
from kvweave.models.inspect import Keys, find_rotation, inspect_layers
from support.tinymodels import CONTEXT, TINY, random_model

# KV heads, key dim, value dim, windows; then the rotation's pairs, interleaved, and offset.
EXPECTED = {
    "llama": (2, 16, 16, (None, None, None), 8, False, 0),
    "qwen2": (2, 16, 16, (None, 7, 7), 8, False, 0),
    "qwen3": (2, 24, 24, (None, None, None), 12, False, 0),
    "mistral": (2, 16, 16, (9, 9, 9), 8, False, 0),
    "phi3": (2, 16, 16, (None, None, None), 4, False, 0),
    "neox": (4, 16, 16, (None, None, None), 2, False, 0),
    "gptj": (4, 16, 16, (None, None, None), 4, True, 0),
    "gemma2": (2, 16, 16, (8, None, 8), 8, False, 0),
    "gemma3": (2, 16, 16, (8, None, 8), 8, False, 0),
    "yarn": (2, 16, 16, (None, None, None), 8, False, 0),
    "llama3": (2, 16, 16, (None, None, None), 8, False, 0),
    "linear": (2, 16, 16, (None, None, None), 8, False, 0),
    "longrope": (2, 16, 16, (None, None, None), 8, False, 0),
    "mla_half": (4, 24, 20, (None, None, None), 4, False, 16),
    # transformers sorts interleaved pairs into halves as it rotates them: so they lie in the pool.
    "mla_interleaved": (4, 24, 20, (None, None, None), 4, False, 16),
    "mla_v2": (4, 24, 20, (None, None, None), 4, True, 16),
}
ROTATING = [*EXPECTED, "smollm3"]


def rotated(key: np.ndarray, distance: int, rotary: Rotary) -> np.ndarray:
    """`key` (heads, dim) moved by `distance`, pair by pair, as Rotary's own words say."""
    moved = key.copy()
    pairs = len(rotary.inv_freq)
    for i, frequency in enumerate(rotary.inv_freq):
        if rotary.interleaved:
            a, b = rotary.offset + 2 * i, rotary.offset + 2 * i + 1
        else:
            a, b = rotary.offset + i, rotary.offset + i + pairs
        cos, sin = math.cos(distance * frequency), math.sin(distance * frequency)
        moved[:, a] = key[:, a] * cos - key[:, b] * sin
        moved[:, b] = key[:, a] * sin + key[:, b] * cos
    return moved


def keys_at(loaded: LoadedModel, token: int, positions: list[int]) -> list[np.ndarray]:
    """Per layer, the key (positions, heads, dim) of a token that sees only itself."""
    found: list[np.ndarray] = []

    def note(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_,
        **__,
    ) -> tuple[torch.Tensor, None]:
        found.append(key[0].transpose(0, 1).double().numpy())
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, dim=1).transpose(1, 2), None

    with torch.inference_mode(), hooks.attention(note):
        loaded.model(
            input_ids=torch.full((1, len(positions)), token),
            position_ids=torch.tensor([positions]),
            use_cache=False,
        )
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_the_layout_of_known_models(name: str, tiny: Callable[[str], LoadedModel]) -> None:
    heads, key_dim, value_dim, windows, pairs, interleaved, offset = EXPECTED[name]
    layouts = tiny(name).layouts
    assert tuple(at.window for at in layouts) == windows
    for at in layouts:
        assert (at.num_kv_heads, at.key_dim, at.value_dim) == (heads, key_dim, value_dim)
        assert at.fixed_because is None
        assert at.rotary is not None
        assert len(at.rotary.inv_freq) == pairs
        assert (at.rotary.interleaved, at.rotary.offset) == (interleaved, offset)


@pytest.mark.parametrize("name", ROTATING)
def test_inspected_rotations_move_keys(name: str, tiny: Callable[[str], LoadedModel]) -> None:
    """In every layer, at positions that inspection never tried, in both directions."""
    loaded = tiny(name)
    positions = [5, 47, 30]
    for at, keys in zip(loaded.layouts, keys_at(loaded, 77, positions), strict=True):
        assert at.rotary is not None
        for source in range(3):
            for target in range(3):
                moved = rotated(keys[source], positions[target] - positions[source], at.rotary)
                np.testing.assert_allclose(moved, keys[target], atol=1e-4 * np.abs(keys).max())
        if len(at.rotary.inv_freq):
            assert np.abs(keys[0] - keys[1]).max() > 0.05 * np.abs(keys).max()


def test_gemma_layers_have_their_own_frequencies(tiny: Callable[[str], LoadedModel]) -> None:
    local, everywhere, _ = (at.rotary for at in tiny("gemma3").layouts)
    assert local is not None
    assert everywhere is not None
    assert local.inv_freq[-1] == pytest.approx(10_000 ** (-14 / 16))
    assert everywhere.inv_freq[-1] == pytest.approx(1_000_000 ** (-14 / 16))


def test_a_layer_without_position_rotates_nothing(tiny: Callable[[str], LoadedModel]) -> None:
    pairs = [len(at.rotary.inv_freq) for at in tiny("smollm3").layouts if at.rotary is not None]
    assert pairs == [8, 0, 8]


def test_learned_positions_cannot_be_moved(tiny: Callable[[str], LoadedModel]) -> None:
    for at in tiny("gpt2").layouts:
        assert at.rotary is None
        assert at.fixed_because is not None
        assert "learned" in at.fixed_because


def test_a_model_without_any_position_cannot_be_moved() -> None:
    config = TINY["smollm3"]()
    config.no_rope_layers = [0, 0, 0]
    for at in inspect_layers(random_model(config), CONTEXT):
        assert at.rotary is None
        assert at.fixed_because == "they carry no position"


def test_frequencies_that_the_model_does_not_use_are_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model(TINY["llama"]())
    rotary = model.model.rotary_emb
    honest = rotary.forward
    # One hundredth faster than the table says.
    monkeypatch.setattr(rotary, "forward", lambda x, position_ids: honest(x, position_ids * 1.01))
    layouts = inspect_layers(model, CONTEXT)
    assert all(at.rotary is None for at in layouts)
    assert all("otherwise than by a rotation" in str(at.fixed_because) for at in layouts)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gptj", "gemma3", "mla_v2"])
def test_rotations_are_found_in_bfloat16_too(
    name: str, tiny: Callable[[str], LoadedModel], tiny_folder: Callable[[str], Path]
) -> None:
    def summary(loaded: LoadedModel) -> list[tuple[object, ...]]:
        return [
            (len(at.rotary.inv_freq), at.rotary.interleaved, at.rotary.offset, at.window)
            for at in loaded.layouts
            if at.rotary is not None
        ]

    narrow = load_model(ModelConfig(model=str(tiny_folder(name)), dtype="bfloat16", device="cpu"))
    assert narrow.model.dtype == torch.bfloat16
    assert summary(narrow) == summary(tiny(name))


def test_a_rotation_the_other_way_round_is_found() -> None:
    positions = np.array([0.0, 1.0, 200.0, 201.0])
    table = 10_000 ** (-np.arange(8) / 8)
    key = np.random.default_rng(0).normal(size=(2, 16))
    values = np.stack([rotated(key, int(p), Rotary(-table)) for p in positions])
    found = find_rotation(Keys(values, positions, 2e-3), [table])
    assert found is not None
    np.testing.assert_array_equal(found.inv_freq, -table)


def test_the_nearest_of_several_tables_is_taken() -> None:
    random = np.random.default_rng(0)
    positions = np.array([0.0, 1.0, 200.0, 201.0])
    right = 10_000 ** (-np.arange(8) / 8)
    key = random.normal(size=(2, 16))
    rotary = Rotary(right, interleaved=True)
    values = np.stack([rotated(key, int(p), rotary) for p in positions])
    keys = Keys(values, positions, 2e-3)
    tables = [right * 1.001, 500 ** (-np.arange(8) / 8), right]
    found = find_rotation(keys, tables)
    assert found is not None
    assert found.interleaved
    assert found.inv_freq is right
    assert find_rotation(keys, tables[:2]) is None
    assert find_rotation(keys, []) is None


def test_what_masks_let_queries_see() -> None:
    described = hooks.described_window
    assert described(masking_utils.causal_mask_function) == 0
    assert described(masking_utils.sliding_window_causal_mask_function(33)) == 33
    for odd in (
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_bidirectional_mask_function(5),
        masking_utils.chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.int)),
        lambda batch, head, q, kv: (kv <= q) & (kv != 7),
        lambda batch, head, q, kv: kv < q,
    ):
        assert described(odd) == hooks.UNKNOWN_MASK
