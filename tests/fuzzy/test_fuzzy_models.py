"""Tests of moved KV in real models, with every kind of rotation that is served.

In layer 0 a key depends on nothing but its token and its position, and a value on its token:
there a moved span must equal what computing it would have given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvweave.config import CacheConfig, EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.factory import build_components
from kvweave.engine.types import GenerateRequest, SamplingParams
from kvweave.errors import UnsupportedModelError
from kvweave.kv.tensors import KVTensors
from kvweave.models import LoadedModel
from kvweave.prefix.lease import Plan
from support.fuzzy_world import SMALL

KINDS = (
    "llama",
    "qwen3",
    "phi3",
    "neox",
    "gptj",
    "gemma3",
    "gemma4",
    "gpt_oss",
    "mistral",
    "smollm3",
    "linear",
    "llama3",
    "yarn",
    "mla_half",
    "mla_interleaved",
    "mla_v2",
)


class Bench:
    """An engine whose tensors can be read while a request still holds its lease."""

    def __init__(self, loaded: LoadedModel, backend: str, page_size: int = 4) -> None:
        cache = CacheConfig(
            prefix_cache_backend=backend, page_size=page_size, max_total_tokens=2048
        )
        config = EngineConfig(cache=cache, fuzzy=SMALL)
        components = build_components(config, loaded)
        self.kv: KVTensors = components.runner.kv  # type: ignore[attr-defined]
        self.engine = Engine(config, loaded, components)
        self._count = 0

    def serve(self, tokens: list[int]) -> None:
        self._start(tokens, max_tokens=1)
        assert not self.engine.has_work

    def computed(self, tokens: list[int]) -> tuple[Plan, list[torch.Tensor], list[torch.Tensor]]:
        """The plan, and per layer the keys and the values of the prompt's positions."""
        self._start(tokens, max_tokens=9)
        [sequence] = self.engine.scheduler.running
        lease = sequence.lease
        assert lease is not None
        size = self.kv.page_size
        at = np.arange(len(tokens))
        slots = torch.from_numpy(lease.pages[at // size].astype(np.int64) * size + at % size)
        layers = range(len(self.kv.layouts))
        keys = [self.kv.read_keys(layer, slots) for layer in layers]
        values = [self.kv.read_values(layer, slots) for layer in layers]
        plan = lease.plan
        self.engine.abort(sequence.group.request.rid)
        return plan, keys, values

    def _start(self, tokens: list[int], max_tokens: int) -> None:
        self._count += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        rid, prompt = f"r{self._count}", tuple(tokens)
        self.engine.add(GenerateRequest(rid=rid, prompt_ids=prompt, sampling=sampling))
        self.engine.step()


def check_moved(loaded: LoadedModel, tokens: Callable[[int, int], list[int]], page: int) -> None:
    document = tokens(1, 90)
    donor = tokens(2, 7) + document + tokens(3, 16)
    prompt = tokens(4, 30) + document + tokens(5, 8) + document[20:70] + tokens(6, 9)
    warm, cold = Bench(loaded, "fuzzy_match", page), Bench(loaded, "none", page)
    warm.serve(donor)
    plan, keys, values = warm.computed(prompt)
    nothing, true_keys, true_values = cold.computed(prompt)
    _, donor_keys, _ = cold.computed(donor)
    assert len(plan.spans) == 2
    assert plan.served > 125
    assert nothing.spans == ()

    noise = 3e-6 * float(true_keys[0].abs().max())
    torch.testing.assert_close(keys[0], true_keys[0], rtol=0, atol=4 * noise)
    torch.testing.assert_close(values[0], true_values[0], rtol=0, atol=4 * noise)
    span = plan.spans[0]
    lent = donor_keys[0][span.donor_start : span.donor_start + span.length]
    there = true_keys[0][span.start : span.end]
    assert float((lent - there).abs().max()) > 1000 * noise, "nothing was there to be turned"
    for layer, (key, true_key) in enumerate(zip(keys, true_keys, strict=True)):
        before = slice(0, plan.spans[0].start)
        torch.testing.assert_close(key[before], true_key[before], rtol=1e-4, atol=4 * noise)
        assert not torch.equal(key, true_key), layer


@pytest.mark.parametrize("kind", KINDS)
def test_layer_zero_is_what_computing_it_would_have_given(
    kind: str, tiny: Callable[[str], LoadedModel]
) -> None:
    def tokens(seed: int, length: int) -> list[int]:
        return np.random.default_rng(seed).integers(0, 256, length).tolist()  # type: ignore[no-any-return]

    check_moved(tiny(kind), tokens, page=(1, 4, 16)[len(kind) % 3])


@pytest.mark.parametrize("kind", ["llama", "gptj", "phi3", "mla_interleaved", "mistral"])
def test_int8_keys_that_moved_are_as_near_as_two_roundings_allow(
    kind: str, tiny: Callable[[str], LoadedModel]
) -> None:
    rng = np.random.default_rng(1)
    document, head, tail = (rng.integers(0, 256, n).tolist() for n in (90, 30, 9))
    loaded = replace(tiny(kind), kv_dtype=torch.int8)
    warm, cold = Bench(loaded, "fuzzy_match"), Bench(tiny(kind), "none")
    warm.serve(head[:7] + document + tail)
    plan, keys, values = warm.computed(head + document + tail[::-1])
    _, true_keys, true_values = cold.computed(head + document + tail[::-1])
    assert plan.served > 70
    for got, true, roundings in (
        (keys[0], true_keys[0], 1.25),  # turning may enlarge a scale by sqrt(2)
        (values[0], true_values[0], 0.51),
    ):
        step = true.abs().amax(-1, keepdim=True) / 127
        assert bool(((got - true).abs() <= roundings * step).all())
    assert not torch.equal(keys[0], true_keys[0])


@pytest.mark.model
def test_layer_zero_of_the_packaged_model(packaged: LoadedModel) -> None:
    def tokens(seed: int, length: int) -> list[int]:
        return np.random.default_rng(seed).integers(1000, 40_000, length).tolist()  # type: ignore[no-any-return]

    check_moved(packaged, tokens, page=16)


def test_a_model_whose_positions_are_learned_is_refused(
    tiny: Callable[[str], LoadedModel],
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"cannot be moved.*position"):
        Bench(tiny("gpt2"), "fuzzy_match")
    Bench(tiny("gpt2"), "radix")
