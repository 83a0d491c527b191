"""Quantised models: what is quantised, what comes out, and what is kept in the cache folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvweave import kernels
from kvweave.config import ModelConfig
from kvweave.engine.attention import get_backend
from kvweave.engine.attention.base import ForwardBatch
from kvweave.engine.execution.runner import ModelRunner
from kvweave.engine.selfcheck.measure import quantization_cost
from kvweave.errors import ConfigError
from kvweave.kv.tensors import KVTensors
from kvweave.models import LoadedModel, load_model
from kvweave.models.cache import silent
from kvweave.models.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedWeight
from support.tinymodels import CONTEXT, VOCABULARY

LONG = 100
native = pytest.mark.skipif(kernels.load() is None, reason="there is no compiled kernel here")


def load(folder: Path, quantization: str = "int8") -> LoadedModel:
    settings = ModelConfig(model=str(folder), device="cpu", quantization=quantization)
    return load_model(replace(settings, dtype="float32"))


def make_runner(loaded: LoadedModel, dtype: torch.dtype = torch.float32) -> ModelRunner:
    kv = KVTensors(loaded.layouts, CONTEXT, 1, dtype=dtype)
    for tensor in (*kv.keys, *kv.values):
        tensor.zero_()
    return ModelRunner(loaded, kv, get_backend("cpu", loaded.device))


def logits(
    loaded: LoadedModel, steps: tuple[int, ...] = (LONG,), runner: ModelRunner | None = None
) -> torch.Tensor:
    """Of all tokens of one text, computed in steps of so many tokens."""
    runner = runner or make_runner(loaded)
    tokens = np.random.default_rng(3).integers(0, VOCABULARY - 5, LONG)
    pages, found, first = np.arange(CONTEXT, dtype=np.int32)[::-1].copy(), [], 0
    for count in steps:
        at = np.arange(first, first + count)
        batch = ForwardBatch(
            token_ids=tokens[at],
            positions=at,
            slots=CONTEXT - 1 - at,
            query_start=np.array([0, count], np.int32),
            pages=pages,
            page_start=np.array([0, CONTEXT], np.int32),
            page_size=1,
            logits_at=np.arange(count),
        )
        found.append(runner.forward(batch))
        first += count
    return torch.cat(found)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@native
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "yarn", "smollm3"])
def test_a_decoder_gives_the_logits_of_the_models_own_code(
    name: str, tiny: Callable[[str], LoadedModel], tiny_folder: Callable[[str], Path]
) -> None:
    loaded = load(tiny_folder(name))
    assert loaded.bits == (8,)
    assert loaded.decoder is not None
    own_code = replace(loaded, decoder=None)
    found = logits(loaded)
    assert difference(found, logits(own_code)) < 3e-4
    assert difference(logits(loaded, (64, 1, 35)), found) < 3e-4
    # The quantised model is near the model, and not the model.
    assert 1e-4 < difference(found, logits(tiny(name))) < 0.1


@native
@pytest.mark.parametrize("dtype", kernels.FLOATS, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_kernels_write_kv_as_torch_rounds_it(
    name: str, dtype: torch.dtype, tiny_folder: Callable[[str], Path]
) -> None:
    loaded = load(tiny_folder(name))
    assert loaded.decoder is not None
    for level in range(loaded.decoder._level + 1):
        loaded.decoder._level = level
        direct, by_torch = make_runner(loaded, dtype), make_runner(loaded, dtype)
        by_torch.targets = lambda layer: None  # type: ignore[method-assign]
        found = [logits(loaded, (64, 1, 35), runner) for runner in (direct, by_torch)]
        assert torch.equal(*found)
        for ours, theirs in zip(direct.kv._parts(), by_torch.kv._parts(), strict=True):
            assert ours.any()
            assert torch.equal(ours, theirs)


@native
@pytest.mark.parametrize("name", ["gemma3", "phi3", "neox"])
def test_other_models_run_by_their_own_code_with_quantised_weights(
    name: str, tiny: Callable[[str], LoadedModel], tiny_folder: Callable[[str], Path]
) -> None:
    loaded = load(tiny_folder(name))
    assert loaded.bits == (8,)
    assert loaded.decoder is None
    assert difference(logits(loaded), logits(tiny(name))) < 0.1


@native
def test_a_decoder_that_computes_something_else_is_not_used(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvweave.models import decoder

    right = decoder._Layer.__init__

    def wrong(self: decoder._Layer, *given: object) -> None:
        right(self, *given)  # type: ignore[arg-type]
        self.struct.eps = 0.5

    monkeypatch.setattr(decoder._Layer, "__init__", wrong)
    assert load(tiny_folder("llama")).decoder is None


def test_weights_are_quantised_where_that_is_asked_for(
    tiny_folder: Callable[[str], Path],
) -> None:
    folder = tiny_folder("llama")
    plain, eight, four = (load(folder, name) for name in ("auto", "int8", "int4"))
    assert plain.bits == ()
    assert eight.bits == (8,)
    assert four.bits == (4, 8)
    assert len({each.identity for each in (plain, eight, four)}) == 3
    assert four.number_types == "float32, int4 and int8 weights"
    head = four.model.get_output_embeddings()
    assert isinstance(head, QuantizedLinear)
    assert head.quantized.bits == 8
    assert difference(logits(four), logits(plain)) < 0.6


def test_quantised_weights_in_bfloat16_are_served_by_the_models_own_code(
    tiny_folder: Callable[[str], Path],
) -> None:
    settings = ModelConfig(model=str(tiny_folder("llama")), device="cpu", quantization="int8")
    loaded = load_model(replace(settings, dtype="bfloat16"))
    assert loaded.bits == (8,)
    assert loaded.decoder is None


@native
@pytest.mark.model
def test_the_packaged_model_keeps_its_bits_and_little_memory(
    packaged: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    first, again = (load_model(ModelConfig(device="cpu", dtype="float32")) for _ in range(2))
    for loaded in (first, again):
        assert loaded.bits == (4, 8)
        assert loaded.decoder is not None
        assert loaded.eos_token_ids == packaged.eos_token_ids
        assert loaded.layouts[0].rotary is not None
    kept = again.model.get_submodule("model.layers.3.mlp")
    exact = packaged.model.get_submodule("model.layers.3.mlp")
    for name in ("gate_proj", "up_proj", "down_proj"):
        # The file's very numbers.
        assert torch.equal(getattr(kept, name).weight, getattr(exact, name).weight)
    embedding = again.model.get_input_embeddings()
    assert isinstance(embedding, QuantizedEmbedding)
    assert embedding.quantized is again.model.get_output_embeddings().quantized
    assert embedding.quantized.nbytes < 31e6
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_the_cost_of_quantised_weights_is_measured(
    tiny: Callable[[str], LoadedModel], tiny_folder: Callable[[str], Path]
) -> None:
    settings = ModelConfig(model=str(tiny_folder("llama")), device="cpu", quantization="int8")
    settings = replace(settings, dtype="float32")
    cost = quantization_cost(settings, load_model(settings), silent)
    assert cost is not None
    assert 0 < cost.kl_mean <= cost.kl_worst < 0.1
    assert cost.perplexity == pytest.approx(cost.float_perplexity, rel=0.05)
    assert cost.same_top > 0.8
    assert quantization_cost(settings, tiny("llama"), silent) is None


def test_weights_that_lose_by_it_are_not_quantised_by_auto() -> None:
    from kvweave.models.quantized import _without_loss

    noise = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    assert _without_loss(noise) is None
    for bits in (4, 8):
        found = _without_loss(QuantizedWeight.of(noise, bits).dequantize())
        assert found is not None
        assert found.bits == bits


def test_quantisation_is_refused_on_other_devices(tiny_folder: Callable[[str], Path]) -> None:
    settings = ModelConfig(model=str(tiny_folder("llama")), device="meta", quantization="int8")
    with pytest.raises(ConfigError, match="--quantization int8 is for CPUs"):
        load_model(settings)
