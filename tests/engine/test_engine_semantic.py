"""Other words for the same, from a real model's prompt to its answer, with a real embedder."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig
from kvweave.engine.engine import Engine
from kvweave.engine.factory import build_components
from kvweave.engine.types import Completion, GenerateRequest, SamplingParams
from kvweave.fuzzy.backend import FuzzyCache
from kvweave.fuzzy.donors import slots_of
from kvweave.kv.relocation import MoveRun, relocate
from kvweave.models import LoadedModel
from kvweave.prefix.lease import Tier

pytestmark = pytest.mark.model

HEAD = (
    "A note for the staff of the school office. Parents ask us many things by mail, and all of "
    "them deserve a friendly answer within two days. Look into the calendar before you reply. "
)
TAIL = (
    " Answer in plain words, and add where they can read more about it. If a question is about "
    "money, hand it over to the accounts. If it is about illness, hand it over to the nurse.\n"
)
QUESTION = "Whom does the office hand questions about illness over to?\n"
DONOR = "They've bought the ticket for the autumn fair, but they don't have it."
SAME = "They have bought the ticket for the autumn fair, but they do not have it."
CONFIG = FuzzyConfig(
    refresh_tokens=0,
    provider="semantic",
    semantic_embedder="use",
    semantic_budget_ms=30_000.0,
)


class Office:
    """An engine, and prompts about one office."""

    def __init__(self, loaded: LoadedModel, fuzzy: FuzzyConfig) -> None:
        cache = CacheConfig(prefix_cache_backend="fuzzy_match", max_total_tokens=512)
        config = EngineConfig(cache=cache, fuzzy=fuzzy)
        self.components = build_components(config, loaded)
        self.engine = Engine(config, loaded, self.components)
        self.tokenizer = loaded.tokenizer
        self.count = 0

    @property
    def cache(self) -> FuzzyCache:
        assert isinstance(self.engine.cache, FuzzyCache)
        return self.engine.cache

    def ids(self, sentence: str, opening: str = "") -> list[int]:
        return self.tokenizer.encode(opening + HEAD + sentence + TAIL + QUESTION)

    def ask(self, sentence: str, opening: str = "", **more: object) -> Completion:
        ids = self.ids(sentence, opening)
        self.count += 1
        more.setdefault("protected_from", len(ids) - len(self.tokenizer.encode(QUESTION)))
        self.engine.add(
            GenerateRequest(
                rid=f"r{self.count}",
                prompt_ids=tuple(ids),
                sampling=SamplingParams(max_tokens=2, temperature=0.0),
                **more,  # type: ignore[arg-type]
            )
        )
        answer = Completion()
        while self.engine.has_work:
            for delta in self.engine.step():
                answer.extend(delta)
            self.engine.check()
        assert answer.error is None
        return answer

    def teach(self, sentence: str) -> None:
        self.ask(sentence)
        assert self.cache.settle(200)


@pytest.fixture(scope="module")
def office(packaged: LoadedModel) -> Office:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvweave.paraphrase.embedding_queue._QUIET", 0.05)  # seconds till it is idle
        return Office(packaged, CONFIG)


@pytest.fixture(autouse=True)
def empty(office: Office) -> None:
    office.engine.flush_cache()


def paraphrased(answer: Completion) -> int:
    spans = [span.length for span in answer.plan if span.tier is Tier.PARAPHRASE]
    assert answer.usage.paraphrase_tokens == sum(spans)
    assert answer.usage.moved_tokens == sum(s.length for s in answer.plan) - sum(spans)
    return sum(spans)


@pytest.mark.parametrize(
    ("sentence", "served"),
    [
        (SAME, True),
        ("They have bought the ticket for the autumn fair, but they do not need it.", False),
        ("They have bought the ticket for the spring fair, but they do not have it.", False),
        ("They have not bought the ticket for the autumn fair, but they do have it.", False),
        ("They had bought the ticket for the autumn fair, but they do not have it.", False),
    ],
)
def test_a_paraphrase_is_served_and_a_near_miss_is_not(
    office: Office, sentence: str, served: bool
) -> None:
    office.teach(DONOR)
    before = office.engine.snapshot().paraphrase_refused.get("facts", 0)
    answer = office.ask(sentence)
    assert (paraphrased(answer) > 0) is served
    assert office.engine.snapshot().paraphrase_refused.get("facts", 0) - before == (not served)
    assert answer.usage.moved_tokens > 30
    assert answer.token_ids


def test_what_is_served_is_the_donors_kv_at_the_recipients_place(
    office: Office, packaged: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind an opening of another length, so that keys are turned."""
    office.teach(DONOR)
    kv, seen = office.components.runner.kv, []  # type: ignore[attr-defined]
    move = office.cache._mover.move

    def watched(runs: list[MoveRun]) -> None:
        move(runs)
        seen.extend((run, [layer[run.targets].clone() for layer in kv.keys]) for run in runs)

    monkeypatch.setattr(office.cache._mover, "move", watched)
    opening = "Dear all. "
    answer = office.ask(SAME, opening)
    [span] = [span for span in answer.plan if span.tier is Tier.PARAPHRASE]
    shift = len(office.ids(SAME, opening)) - len(office.ids(SAME))
    assert span.start - span.donor_start == shift
    theirs = office.ids(DONOR)[span.donor_start : span.donor_start + span.length]
    ours = office.ids(SAME, opening)[span.start : span.end]
    assert theirs != ours
    [(run, turned)] = [(run, keys) for run, keys in seen if len(run.sources) == span.length]
    node = office.cache._donors.named(span.donor)
    assert node is not None
    pages = office.cache.tree.path_pages(node)
    end = span.donor_start + span.length
    assert np.array_equal(run.sources, slots_of(pages, 16, span.donor_start, end))
    for layer, layout in enumerate(kv.layouts):
        assert layout.rotary is not None
        expected = relocate(kv.keys[layer][run.sources], layout.rotary, shift)
        assert torch.allclose(turned[layer], expected, atol=1e-4)
        assert torch.equal(kv.values[layer][run.targets], kv.values[layer][run.sources])


def test_nobody_gets_other_words_who_did_not_ask(packaged: LoadedModel) -> None:
    office = Office(packaged, dataclasses.replace(CONFIG, provider="spans"))
    office.teach(DONOR)
    answer = office.ask(SAME)
    assert paraphrased(answer) == 0
    assert answer.usage.moved_tokens > 30


def test_salts_keep_meanings_apart(office: Office) -> None:
    office.teach(DONOR)
    assert office.ask(SAME, cache_salt="another").plan == ()
    assert paraphrased(office.ask(SAME)) > 0


def test_a_request_may_want_no_part_in_other_words(office: Office) -> None:
    office.teach(DONOR)
    assert paraphrased(office.ask(SAME, fuzzy_semantic=False)) == 0
    office.engine.flush_cache()
    office.ask(DONOR, fuzzy_semantic=False)
    assert office.cache.settle(200)
    answer = office.ask(SAME)
    assert (paraphrased(answer), answer.usage.moved_tokens > 30) == (0, True)


def test_questions_and_exact_requests_are_computed(office: Office) -> None:
    office.teach(DONOR)
    for more in ({"protected_from": None}, {"protected_from": 30}, {"fuzzy": False}):
        assert paraphrased(office.ask(SAME, **more)) == 0  # type: ignore[arg-type]


def test_an_embedder_that_is_killed_costs_nobody_an_answer(office: Office) -> None:
    desk = office.cache._guard._provider.queue  # type: ignore[attr-defined]
    failed = desk.counts["failed"]
    desk._embedder._process._running[0].kill()
    assert office.ask("Nobody has ever asked for this before, nor will again.").token_ids
    assert office.cache.settle(200)
    assert desk.counts["failed"] > failed
    office.engine.flush_cache()
    office.teach(DONOR)
    assert paraphrased(office.ask(SAME)) > 0, "another one has been started"
    office.engine.check()


def test_under_pressure_donors_go_and_answers_come(office: Office) -> None:
    for turn in range(12):
        answer = office.ask(
            (DONOR, SAME)[turn % 2].replace("the ticket", f"ticket {turn // 2}"),
            f"{turn}. ",
            fuzzy=bool(turn % 2),  # the others are computed, and donors from end to end
        )
        assert answer.token_ids
        if turn % 3:
            assert office.cache.settle(200)
    assert office.engine.snapshot().evicted_tokens > 0
