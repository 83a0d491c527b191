"""Faults inside a real model's forward pass, also between layers, when half of its KV is there."""

from __future__ import annotations

import numpy as np
import pytest

from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig, SchedulerConfig
from kvweave.engine.engine import Engine
from kvweave.engine.execution.selective_recompute import (
    QuestionAttention,
    RecomputeSelector,
    TokenPruning,
)
from kvweave.engine.types import Completion, GenerateRequest, SamplingParams
from support.faultkit import WORDS, Trap, by_rows
from support.tinymodels import VOCABULARY, assert_equal, reference

RNG = np.random.default_rng(11)
DOCUMENT = RNG.integers(0, VOCABULARY - 5, 90).tolist()
PROMPTS = {
    "early": RNG.integers(0, VOCABULARY - 5, 40).tolist(),
    "victim": RNG.integers(0, VOCABULARY - 5, 9).tolist() + DOCUMENT + [1, 2, 3, 4, 5, 6, 7, 8, 9],
    "late": DOCUMENT[:60] + RNG.integers(0, VOCABULARY - 5, 20).tolist(),
}
TOKENS = 6
FUZZY = FuzzyConfig(refresh=0.3, time_budget_ms=10_000.0)


def asked(rid: str, fuzzy: bool = False) -> GenerateRequest:
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS)
    name = rid.split()[0]
    return GenerateRequest(rid=rid, prompt_ids=tuple(PROMPTS[name]), sampling=sampling, fuzzy=fuzzy)


def run(engine: Engine) -> dict[str, Completion]:
    answers: dict[str, Completion] = {}
    while engine.has_work:
        for delta in engine.step():
            answers.setdefault(delta.rid, Completion()).extend(delta)
        engine.check()
    return answers


def trapped(patch, trap: Trap, owner, name: str, layer: int | None) -> None:
    original = getattr(owner, name)

    def springing(*args, **more):
        if layer is None or any(getattr(arg, "layer", arg) is layer for arg in args):
            trap.spring(*RUNNING)
        return original(*args, **more)

    patch.setattr(owner, name, springing)


RUNNING: list[str] = []
"""Whose rows are in the forward pass right now."""


EVERYWHERE = [("attention", "begin", None), ("attention", "attend", 2), ("kv", "write", 1)]
RECOMPUTING = [
    (RecomputeSelector, "observe", None),
    (TokenPruning, "_prune", None),
    (QuestionAttention, "see", None),
]


@pytest.mark.parametrize(
    ("backend", "place", "name", "layer"),
    [
        *(("hash", *each) for each in EVERYWHERE),
        *(("fuzzy_match", *each) for each in EVERYWHERE + RECOMPUTING),
    ],
)
def test_who_is_to_blame_fails_and_the_others_are_computed_again(
    tiny, backend, place, name, layer, monkeypatch
):
    loaded = tiny("llama")
    config = EngineConfig(
        cache=CacheConfig(prefix_cache_backend=backend, page_size=4, max_total_tokens=1024),
        fuzzy=FUZZY,
        scheduler=SchedulerConfig(chunked_prefill_size=64),
    )
    engine, trap = Engine(config, loaded), Trap()
    PROMPTS["donor"] = [*RNG.integers(0, VOCABULARY - 5, 5).tolist(), *DOCUMENT]
    engine.add(asked("donor"))
    run(engine)
    pack, runner = engine._executor._batch_builder.pack, engine.components.runner

    def noted(rows):
        RUNNING[:] = by_rows(rows)
        return pack(rows)

    with monkeypatch.context() as patch:
        patch.setattr(engine._executor._batch_builder, "pack", noted)
        owner = {"attention": runner.backend, "kv": runner.kv}.get(place, place)
        trapped(patch, trap, owner, name, layer)
        engine.add(asked("early"))
        first = engine.step()
        for rid, fuzzy in (("victim", True), ("late", False)):
            engine.add(asked(rid, fuzzy))
        answers = run(engine)
    assert trap.fired > 0
    assert answers["victim"].finish_reason == "error"
    assert WORDS in answers["victim"].error
    now = engine.snapshot()
    assert (now.used_tokens, now.failed) == (0, 1)
    engine.add(asked("victim again"))
    engine.add(asked("late again"))
    answers |= run(engine)
    answers["early"].token_ids[:0] = [token for delta in first for token in delta.token_ids]
    rids = ["early", "late", "victim again", "late again"]
    references = [reference(loaded, PROMPTS[rid.split()[0]], TOKENS) for rid in rids]
    assert all(each.clear > 2 for each in references)
    assert_equal([answers[rid].token_ids for rid in rids], references)
