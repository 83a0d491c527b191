"""With quantised weights an exact prefix cache changes no bit of an answer.

Rows are rounded to 8 bits before they are multiplied, which makes large differences of the least.
So attention and all else in a step must add in one order, whatever else the step computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from kvweave.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from kvweave.engine.engine import Engine
from kvweave.engine.types import Completion, GenerateRequest, SamplingParams, TokenLogprob
from kvweave.models import LoadedModel, load_model
from support.enginekit import collect
from support.tinymodels import CONTEXT, VOCABULARY, save

ANSWER = 5
# Heads of 64 numbers, as large models have: the kernel reads these where they lie.
WIDE = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=96,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=4 * CONTEXT,
)

Lines = list[TokenLogprob]


@pytest.fixture(scope="module")
def folders(
    tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Decoders that the kernels run, with and without norms of heads, and models' own code."""
    found = {name: tiny_folder(name) for name in ("qwen3", "gemma2", "neox")}
    return found | {"wide": save(WIDE, tmp_path_factory.mktemp("wide") / "wide")}


def ask(engine: Engine, *prompts: Sequence[int], count: int = ANSWER) -> list[Lines]:
    """Log probabilities of greedy answers to prompts that arrive together."""
    sampling = SamplingParams(temperature=0, max_tokens=count, min_tokens=count, logprobs=5)
    answers = {str(number): Completion() for number in range(len(prompts))}
    for rid, prompt in zip(answers, prompts, strict=True):
        engine.add(GenerateRequest(rid=rid, prompt_ids=tuple(prompt), sampling=sampling))
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            collect(answers[delta.rid], delta)
    return [answer.logprobs for answer in answers.values()]


def make_engine(loaded: LoadedModel, backend: str, chunk: int = 2048) -> Engine:
    cache = CacheConfig(prefix_cache_backend=backend, page_size=1, max_total_tokens=4096)
    return Engine(
        EngineConfig(cache=cache, scheduler=SchedulerConfig(chunked_prefill_size=chunk)), loaded
    )


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", ["wide", "qwen3", "gemma2", "neox"])
def test_a_prompt_gives_the_same_bits_however_it_is_computed(
    folders: dict[str, Path], name: str, bits: str, kv_dtype: str
) -> None:
    loaded = load_model(
        ModelConfig(
            model=str(folders[name]),
            device="cpu",
            dtype="float32",
            quantization=bits,
            kv_cache_dtype=kv_dtype,
        )
    )
    rng = random.Random(f"{name} {bits} {kv_dtype}")
    length = rng.randint(150, 190)
    prompt = [rng.randrange(256) for _ in range(length)]
    others = [[rng.randrange(256) for _ in range(rng.randint(1, 90))] for _ in range(2)]
    (cold,) = ask(make_engine(loaded, "none"), prompt)

    for chunk in (1, rng.randint(2, 13), rng.randint(14, 100)):
        assert ask(make_engine(loaded, "none", chunk), prompt) == [cold], f"chunks of {chunk}"

    cached = make_engine(loaded, "radix")
    for length_cached in sorted((rng.randint(1, length), length - rng.randint(1, 13), length)):
        ask(cached, prompt[:length_cached], count=1)
        assert ask(cached, prompt) == [cold], f"{length_cached} tokens are cached"

    together = ask(make_engine(loaded, "none", rng.randint(60, 300)), others[0], prompt, others[1])
    assert together[1] == cold, "beside other prompts"

    full = [*prompt, *(line.token_id for line in cold)]
    for generated in range(1, ANSWER):
        (prefilled,) = ask(make_engine(loaded, "none"), full[: length + generated], count=1)
        assert prefilled == cold[generated : generated + 1], "decoded and prefilled differ"


def test_threads_change_no_bit(folders: dict[str, Path]) -> None:
    model = ModelConfig(
        model=str(folders["wide"]), device="cpu", dtype="float32", quantization="int8"
    )
    loaded = load_model(model)
    prompt = [(7 * at) % 251 for at in range(900)]
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(ask(make_engine(loaded, "none", 300 * threads), prompt))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
