"""Mixed traffic on two tensor-parallel ranks, each a process with half of every layer's heads.

A rank that decided otherwise would hang SGLang at the next sum over ranks, or answer nonsense. The
model is small and random, so that 400 requests with retraction and aborts take minutes.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, lent, model_folder, running
from test_real_sglang import FUZZY, PLAIN, RULES, _document, is_as_computed
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.timeout(3600)

RANKS = 2
ENVIRONMENT = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_TEST_RETRACT": "1"}
ARGUMENTS = {"tp_size": RANKS, "max_total_tokens": 4096, "chunked_prefill_size": 128}
SETTINGS = {
    "overlapped": {},
    "paged, mixed chunks": {
        "disable_overlap_schedule": True,
        "page_size": 16,
        "enable_mixed_chunk": True,
    },
}
REQUESTS = 400


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


@pytest.fixture(scope="module")
def plain_answers(even_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What SGLang answers without the plug-in."""
    probe = tmp_path_factory.mktemp("plain") / "probe"
    with running(probe, ENVIRONMENT, model_path=even_model, **ARGUMENTS) as engine:
        return [engine.answer(prompt)[0] for prompt in PLAIN]


@pytest.mark.parametrize("setting", SETTINGS)
def test_both_ranks_lend_the_same_and_their_memory_adds_up(
    setting: str, even_model: str, plain_answers: list[str], tmp_path: Path
) -> None:
    arguments = {"model_path": even_model, **FUZZY, **ARGUMENTS, **SETTINGS[setting]}
    with running(tmp_path / "probe", ENVIRONMENT, **arguments) as engine:
        assert [engine.answer(prompt) for prompt in PLAIN] == [(text, 0) for text in plain_answers]
        told = _traffic(engine, random.Random(5))
        told |= {name: engine.counts()[name] for name in ("gone", "no_room", "failed")}
        assert engine.flush(), "SGLang holds slots that nobody owns"
        probed = engine.probed()
    runs = Counter((at["rid"], at["start"], at["lent"]) for at in probed if "lent" in at)
    between = Counter(at["aborted"] for at in probed if "aborted" in at)
    told |= {"runs": len(runs), "between_chunks": len(between)}
    print(f"\n{setting}, {REQUESTS} requests: {told}")
    assert all(number % RANKS == 0 for number in runs.values()), "the ranks lent different runs"
    assert is_as_computed(probed)
    assert told["served"] > REQUESTS // 10
    assert told["failed"] == 0


def _traffic(engine: Engine, chance: random.Random) -> dict[str, Any]:
    """Eight at a time: known and new documents, one or several, behind known and new rules."""
    told = Counter[str]()
    for batch in range(REQUESTS // 8):
        prompts = []
        for at in range(8):
            name = f"{batch}-{at}"
            rule = chance.choice((*RULES, f"Rule {name}, like no other."))
            texts = [
                _document(number) for number in chance.sample(range(20), chance.choice((1, 1, 2)))
            ]
            prompts.append(f"{rule}\n{' And. '.join(texts)}\nWhat of {name}?")
        aborted = {at: chance.uniform(0, 2) for at in range(8) if chance.random() < 0.15}
        for number, found in enumerate(engine.interrupted(prompts, 6, aborted)):
            if isinstance(found, BaseException) or found["meta_info"]["completion_tokens"] < 6:
                assert number in aborted, found
                told["aborted"] += 1
                continue
            told["served"] += lent(found) > 0
            told["retracted"] += found["meta_info"]["num_retractions"]
    return dict(told)
