"""`--kv-cache-dtype`: served by every backend of attention, and part of the model's identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from kvweave.config import CacheConfig, EngineConfig, ModelConfig
from kvweave.engine.engine import Engine
from kvweave.engine.types import Completion, GenerateRequest, SamplingParams
from kvweave.models import LoadedModel, load_model

APART = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.int8: 3e-2}
"""Mean difference of log probabilities that a type of KV may cost a tiny model."""


def logprobs(loaded: LoadedModel, backend: str) -> np.ndarray:
    """Of the tokens of prompts that are computed in chunks, and of answers behind them."""
    config = EngineConfig(
        model=ModelConfig(attention_backend=backend),
        cache=CacheConfig(prefix_cache_backend="none", max_total_tokens=1024),
    )
    engine = Engine(config, loaded)
    sampling = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    answers: dict[str, Completion] = {}
    for seed in range(3):
        prompt = np.random.default_rng(seed).integers(0, 256, 150 + seed).tolist()
        answers[str(seed)] = Completion()
        engine.add(GenerateRequest(rid=str(seed), prompt_ids=tuple(prompt), sampling=sampling))
    while engine.has_work:
        for delta in engine.step():
            answers[delta.rid].extend(delta)
    scored = [
        each.logprob
        for answer in answers.values()
        for each in answer.prompt_logprobs or ()
        if each.logprob is not None
    ]
    return np.array(scored)


@pytest.mark.parametrize("kind", ["llama", "gptj", "gemma2", "mla_v2"])
def test_every_type_of_kv_gives_nearly_the_same_answers(
    kind: str, tiny: Callable[[str], LoadedModel]
) -> None:
    loaded = tiny(kind)
    right = logprobs(loaded, "cpu")
    for dtype, backend in product(APART, ("cpu", "sdpa")):
        other = replace(loaded, kv_dtype=dtype)
        apart = np.abs(logprobs(other, backend) - right).mean()
        assert apart <= APART[dtype], (dtype, backend)
        if dtype != torch.float32:
            assert apart > 0, (dtype, backend)


def test_the_type_of_kv_is_the_weights_unless_named_and_belongs_to_the_identity(
    tiny: Callable[[str], LoadedModel],
) -> None:
    path = tiny("llama").path
    found = {
        name: load_model(ModelConfig(model=path, dtype="bfloat16", kv_cache_dtype=name))
        for name in ("auto", "bfloat16", "float32", "int8")
    }
    types = {name: loaded.kv_dtype for name, loaded in found.items()}
    assert types == {
        "auto": torch.bfloat16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "int8": torch.int8,
    }
    assert found["auto"].identity == found["bfloat16"].identity
    assert len({loaded.identity for loaded in found.values()}) == 3
