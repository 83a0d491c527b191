"""Selective recompute in the forward pass: which tokens are pruned, which KV is written."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig, ModelConfig, SchedulerConfig
from kvweave.engine.attention import get_backend
from kvweave.engine.attention.base import ForwardBatch, RecomputeRequest
from kvweave.engine.engine import Engine
from kvweave.engine.execution.runner import ModelRunner
from kvweave.engine.types import Completion, GenerateRequest
from kvweave.fuzzy import recompute
from kvweave.fuzzy.recompute import Stop, Strategy
from kvweave.kv.tensors import KVTensors
from kvweave.models import LoadedModel, load_model
from support.enginekit import prompt, request
from support.tinymodels import TINY, VOCABULARY, save

LENGTH = 60
MOVED = slice(10, 50)
SPACE = 64
"""Slots per row; its page size is 1 and its pages lie backwards."""
LAYERS = 6


@pytest.fixture(scope="module", params=["none", "int8"])
def loaded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> LoadedModel:
    """Deeper than other tiny models: several stops fit in. By its own code, and by a Decoder."""
    config = TINY["llama"]()
    config.num_hidden_layers = LAYERS
    folder = save(config, tmp_path_factory.mktemp("deep"))
    settings = ModelConfig(model=str(folder), device="cpu", quantization=request.param)
    return load_model(replace(settings, dtype="float32"))


@pytest.fixture(autouse=True)
def strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """For these tests: one with several stops, one that also asks, one that asks above all."""
    stops = (Stop(1 / 3, 2.0), Stop(2 / 3))
    asks = Strategy(question=8.0, stops=(Stop(0),))
    monkeypatch.setitem(recompute.STRATEGIES, "asks", asks)
    monkeypatch.setitem(recompute.STRATEGIES, "stops", Strategy(stops=stops))
    monkeypatch.setitem(recompute.STRATEGIES, "enters", replace(asks, entry=2.0))
    monkeypatch.setitem(recompute.STRATEGIES, "both", Strategy(question=0.5, stops=stops))


class Lab:
    """Rows whose KV is there, computed cold, and then spoiled a little where it is "moved"."""

    def __init__(self, loaded: LoadedModel, rows: int = 1, backend: str = "cpu") -> None:
        self.kv = KVTensors(loaded.layouts, rows * SPACE, 1)
        self.runner = ModelRunner(loaded, self.kv, get_backend(backend, "cpu"))
        rng = np.random.default_rng(5)
        self.tokens = rng.integers(0, VOCABULARY - 5, (rows, LENGTH))
        everything = np.arange(LENGTH)
        self.cold = self.runner.forward(self.batch(dict.fromkeys(range(rows), everything)))
        self.truth = [layer.clone() for layer in (*self.kv.keys, *self.kv.values)]
        noise = torch.Generator().manual_seed(1)
        for layer in (*self.kv.keys, *self.kv.values):
            moved = self.slots(0, everything[MOVED])
            shape = layer[moved].shape
            strength = torch.linspace(0.02, 0.4, len(moved))[:, None, None]
            layer[moved] += strength * torch.randn(shape, generator=noise)
            layer[self.slots(0, np.r_[0:10, 50:60])] = 1e3  # not computed yet
        self.spoiled = [layer.clone() for layer in (*self.kv.keys, *self.kv.values)]

    @staticmethod
    def slots(row: int, positions: np.ndarray) -> np.ndarray:
        return (row + 1) * SPACE - 1 - positions

    def batch(
        self, work: dict[int, np.ndarray], recompute: RecomputeRequest | None = None
    ) -> ForwardBatch:
        at = list(work.values())
        ends = np.cumsum([len(positions) for positions in at])
        return ForwardBatch(
            token_ids=np.concatenate([self.tokens[row][p] for row, p in work.items()]),
            positions=np.concatenate(at).astype(np.int64),
            slots=np.concatenate([self.slots(row, p) for row, p in work.items()]),
            query_start=np.array([0, *ends], np.int32),
            pages=np.concatenate([self.slots(row, np.arange(SPACE)) for row in work]).astype(
                np.int32
            ),
            page_start=np.arange(len(work) + 1, dtype=np.int32) * SPACE,
            page_size=1,
            logits_at=ends - 1,
            recompute=recompute,
        )

    def recomputed(self, strategy: str, budget: int) -> torch.Tensor:
        """All of row 0, its moved tokens as candidates; its logits."""
        candidates = np.zeros(LENGTH, np.bool_)
        candidates[MOVED] = True
        recompute = RecomputeRequest(
            candidates, np.array([budget], np.int32), (strategy,), np.zeros_like(candidates)
        )
        logits = self.runner.forward(self.batch({0: np.arange(LENGTH)}, recompute))[0]
        self.chosen = set(np.flatnonzero(recompute.chosen).tolist())
        return logits

    def written(self, layer: int) -> np.ndarray:
        """Which positions of row 0 hold something else in this layer than when they were moved."""
        slots = self.slots(0, np.arange(LENGTH))
        changed = self.kv.keys[layer][slots] != self.spoiled[layer][slots]
        return np.flatnonzero(changed.any(-1).any(-1).numpy())


def close(logits: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((logits - other).norm() < 1e-4 * other.norm())


@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
@pytest.mark.parametrize("strategy", ["mix", "deviation", "stops", "both"])
def test_refreshing_everything_is_the_cold_answer(loaded, strategy, backend):
    lab = Lab(loaded, backend=backend)
    assert close(lab.recomputed(strategy, 40), lab.cold[0])
    for now, then in zip((*lab.kv.keys, *lab.kv.values), lab.truth, strict=True):
        at = lab.slots(0, np.arange(LENGTH))
        torch.testing.assert_close(now[at], then[at], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("strategy", ["stops", "both"])
def test_fewer_and_fewer_tokens_go_on_and_nothing_else_is_written(loaded, strategy):
    lab = Lab(loaded)
    lab.recomputed(strategy, 6)
    fresh = set(np.r_[0:10, 50:60].tolist())
    written = [set(lab.written(layer).tolist()) for layer in range(LAYERS)]
    assert [len(some - fresh) for some in written] == [40, 40, 12, 12, 6, 6]
    assert lab.chosen == written[-1] - fresh
    assert all(fresh <= some for some in written)
    assert all(later <= earlier for earlier, later in pairwise(written))


def test_only_those_that_the_question_attends_to_enter(loaded):
    lab = Lab(loaded)
    fresh = set(np.r_[0:10, 50:60].tolist())
    lab.recomputed("enters", 6)
    entered, chosen = set(lab.written(0).tolist()) - fresh, lab.chosen
    assert (len(entered), len(chosen)) == (12, 6)
    assert chosen < entered
    lab = Lab(loaded)
    lab.recomputed("enters", 40)
    assert len(lab.chosen) == 40


def test_those_who_deviate_most_stay(loaded):
    lab = Lab(loaded)
    # Spoil six of them far more than the rest in the layers that are looked at.
    worst = np.array([13, 20, 21, 33, 40, 48])
    for layer in (*lab.kv.keys[:2], *lab.kv.values[:2]):
        layer[lab.slots(0, worst)] += 3.0
    lab.recomputed("deviation", 6)
    left = set(lab.written(LAYERS - 1).tolist()) - set(np.r_[0:10, 50:60].tolist())
    assert left == set(worst.tolist()) == lab.chosen


def test_the_question_chooses_what_it_attends_to(loaded):
    lab = Lab(loaded)
    liked = np.array([12, 30, 47])
    seen = {}

    def attend(layer, query, *others):
        if lab.runner._question is not None:
            seen.setdefault(layer, query[-1].clone())
        return original(layer, query, *others)

    original = lab.runner.attend
    lab.runner.attend = attend
    lab.recomputed("asks", 3)  # once, to learn what it asks for
    for layer, query in seen.items():
        heads = lab.kv.layouts[layer].num_kv_heads
        wanted = query.view(heads, -1, query.shape[-1]).mean(1)
        lab.kv.keys[layer].copy_(lab.spoiled[layer])
        lab.kv.keys[layer][lab.slots(0, liked)] = 50 * wanted
    lab.spoiled = [layer.clone() for layer in (*lab.kv.keys, *lab.kv.values)]
    lab.recomputed("asks", 3)
    left = set(lab.written(LAYERS - 1).tolist()) - set(np.r_[0:10, 50:60].tolist())
    assert left == set(liked.tolist()) == lab.chosen


@pytest.mark.parametrize("strategy", ["mix", "both"])
def test_others_in_the_batch_do_not_notice(loaded, strategy):
    lab = Lab(loaded, rows=3)
    everything = np.arange(LENGTH)
    candidates = np.zeros(2 * LENGTH + 1, np.bool_)
    candidates[1 + MOVED.start : 1 + MOVED.stop] = True
    recompute = RecomputeRequest(
        candidates, np.array([0, 5, 0], np.int32), (None, strategy, None), np.zeros_like(candidates)
    )
    work = {1: everything[-1:], 0: everything, 2: everything}
    logits = lab.runner.forward(lab.batch(work, recompute))
    assert close(logits[0], lab.cold[1])
    assert close(logits[2], lab.cold[2])
    alone = Lab(loaded, rows=3)
    assert close(logits[1], alone.recomputed(strategy, 5))


@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
@pytest.mark.parametrize("strategy", ["mix", "deviation", "both"])
def test_a_chunk_of_which_nothing_is_to_be_computed_again(loaded, strategy, backend):
    """As a small share makes of a chunk that lies within a span."""
    lab = Lab(loaded, rows=2, backend=backend)
    inside = np.arange(20, 30)
    candidates = np.ones(10, np.bool_)
    alone = RecomputeRequest(
        candidates, np.array([0], np.int32), (strategy,), np.zeros(10, np.bool_)
    )
    logits = lab.runner.forward(
        replace(lab.batch({0: inside}, alone), logits_at=np.zeros(0, np.int64))
    )
    assert logits.shape == (0, loaded.vocab_size)
    assert not alone.chosen.any()
    assert not len(lab.written(LAYERS - 1)), "served tokens keep the KV that was moved"
    beside = RecomputeRequest(
        np.r_[candidates, [False]],
        np.array([0, 0], np.int32),
        (strategy, None),
        np.zeros(11, np.bool_),
    )
    batch = lab.batch({0: inside, 1: np.array([LENGTH - 1])}, beside)
    logits = lab.runner.forward(replace(batch, logits_at=np.array([10])))
    assert close(logits[0], lab.cold[1])
    assert not beside.chosen.any()


WHOLE = {"gpt2", "gemma4"}
"""Models that need all tokens in all layers."""


@pytest.mark.parametrize("name", sorted(set(TINY) - WHOLE))
def test_tokens_may_drop_out_of_models_of_every_kind(name, tiny):
    assert tiny(name).prunes_tokens
    lab = Lab(tiny(name), rows=2)
    everything = np.arange(LENGTH)
    candidates = np.zeros(2 * LENGTH, np.bool_)
    candidates[MOVED] = True
    for budget in (7, 40):
        recompute = RecomputeRequest(
            candidates,
            np.array([budget, 0], np.int32),
            ("deviation", None),
            np.zeros_like(candidates),
        )
        logits = lab.runner.forward(lab.batch({0: everything, 1: everything}, recompute))
        assert close(logits[1], lab.cold[1])
    assert close(logits[0], lab.cold[0]), "all of them were computed"


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_model_that_needs_all_tokens_in_all_layers_is_told_apart(name, tiny):
    """GPT-2's output has its input's shape; Gemma 4 slices no logits where tokens are gone."""
    assert not tiny(name).prunes_tokens


@pytest.mark.parametrize("strategy", ["mix", "deviation"])
@pytest.mark.parametrize("chunk", [40, 64, 2048])
def test_what_is_recomputed_does_not_depend_on_other_requests(tiny, strategy, chunk):
    """The same plan, alone and beside others that decode, prefill and ask the same."""
    fuzzy = FuzzyConfig(
        refresh_tokens=0,
        stride=4, min_span=8, min_suffix=2, sink_tokens=2, min_reuse_ratio=0.0, refresh=0.15,
        refresh_strategy=strategy, time_budget_ms=10_000.0,
    )  # fmt: skip
    config = EngineConfig(
        cache=CacheConfig(prefix_cache_backend="fuzzy_match", page_size=16, max_total_tokens=4096),
        fuzzy=fuzzy,
        scheduler=SchedulerConfig(chunked_prefill_size=chunk),
    )
    document = prompt(150, 1)
    asked = prompt(9, 2) + document + prompt(11, 3)

    def served(*others: GenerateRequest) -> dict[str, Completion]:
        engine, answers = Engine(config, tiny("llama")), defaultdict(Completion)

        def step() -> None:
            for delta in engine.step():
                answers[delta.rid].extend(delta)

        engine.add(request("donor", prompt(12, 4) + document + prompt(7, 5), 1))
        while engine.has_work:
            step()
        for other in others[:2]:
            engine.add(other)
        for _ in range(2 if others else 0):
            step()
        for other in (*others[2:], request("r", asked, 8)):
            engine.add(other)
        while engine.has_work:
            step()
        return answers

    alone = served()["r"]
    assert alone.usage.moved_tokens > 100
    assert sum(length for _, length in alone.refreshed) == alone.usage.refreshed_tokens > 15
    company = [
        request("decodes", prompt(5, 6), 30),
        request("decodes too", prompt(7, 7), 30),
        request("prefills", prompt(91, 8), 3),
        *(request(f"r{at}", asked, 8) for at in range(3)),
    ]
    answers = served(*company)
    for rid in ("r", "r0", "r1", "r2"):
        assert answers[rid].plan == alone.plan
        assert answers[rid].refreshed == alone.refreshed, rid
        assert answers[rid].token_ids == alone.token_ids, rid
