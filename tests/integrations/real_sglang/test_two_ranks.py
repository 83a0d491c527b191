"""Two tensor-parallel ranks, each a process with half of every layer's heads: both lend alike.

A rank that decided otherwise would hang SGLang at the next sum over ranks, or answer nonsense.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from engines import lent, model_folder, running
from test_real_sglang import FUZZY, PLAIN, RULES, _prompt
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.timeout(1800)

RANKS = 2
BOTH_CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def even_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random model whose heads can be halved, which the packaged one's cannot."""
    folder = str(tmp_path_factory.mktemp("even"))
    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=49_152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,  # or every answer is one token, repeated
    )
    LlamaForCausalLM(settings).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder()).save_pretrained(folder)
    return folder


def test_both_ranks_lend_the_same_and_their_memory_adds_up(even_model: str, tmp_path: Path) -> None:
    arguments = {"model_path": even_model, "tp_size": RANKS, "max_total_tokens": 4096}
    with running(tmp_path / "plain", BOTH_CORES, **arguments) as engine:
        plain = [engine.answer(prompt)[0] for prompt in PLAIN]
    with running(tmp_path / "probe", BOTH_CORES, **FUZZY, **arguments) as engine:
        assert [engine.answer(prompt) for prompt in PLAIN] == [(text, 0) for text in plain]
        chance = random.Random(5)
        served = 0
        for batch in range(10):
            prompts = [
                _prompt(chance.choice(RULES), chance.randrange(20), f"What of {batch}-{at}?")
                for at in range(8)
            ]
            served += sum(lent(found) > 0 for found in engine.ask(prompts, 6))
        assert engine.flush(), "SGLang holds slots that nobody owns"
        probed = engine.probed()
    print(f"two ranks: {served} of 80 lent, {len(probed)} spans on both together")
    assert served > 10
    assert all(at["key"] < 1e-4 and at["value"] < 1e-4 for at in probed), probed
    spans = [(at["start"], at["lent"]) for at in probed]
    assert all(spans.count(span) % RANKS == 0 for span in spans)
