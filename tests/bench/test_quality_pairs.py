"""Paired runs on a tiny model: recorded logits are right, and runs are independent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvweave.config import ModelConfig
from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray
from kvweave.models import LoadedModel, hooks
from kvweave_bench.quality.pairs import Compared, compare, variants_of
from kvweave_bench.quality.scenarios import Scenario
from kvweave_bench.quality.session import Session
from kvweave_bench.quality.variants import Variant, outer_layers, parse_variants
from kvweave_bench.quality.writer import Case

COPY, RERUN = Variant("copy"), Variant("rerun")
SCENARIO = Scenario(name="test", summary="", build=lambda *_: CASE, answer=6)
SLOTS = 1024


def tokens(seed: int, n: int) -> IntArray:
    return np.random.default_rng(seed).integers(10, 250, n, np.int32)


DOCUMENT = tokens(0, 150)
DONOR = np.concatenate([tokens(1, 20), DOCUMENT, tokens(2, 12)])
RECIPIENT = np.concatenate([tokens(3, 31), DOCUMENT, tokens(4, 14)])
CASE = Case((DONOR,), RECIPIENT, "?")


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], LoadedModel]) -> LoadedModel:
    return tiny("llama")


@pytest.fixture
def session(model: LoadedModel) -> Callable[[Variant | None], Session]:
    return lambda variant=None: Session(model, ModelConfig(), variant, SLOTS)


def run(
    model: LoadedModel, variants: list[Variant], *cases: Case, scenario: Scenario = SCENARIO
) -> Compared:
    return compare(model, ModelConfig(), scenario, list(cases), variants)


def by_the_library(model: LoadedModel, sequence: list[int]) -> torch.Tensor:
    """The model's own logits (tokens, vocabulary), by transformers alone."""
    with hooks.implementation(model.model, "eager"), torch.inference_mode():
        return model.model(torch.tensor([sequence])).logits[0].float()


def test_a_probe_keeps_the_logits_that_the_model_gave(
    model: LoadedModel, session: Callable[..., Session]
) -> None:
    served = session().serve(RECIPIENT, 6)
    assert list(served.trace.tokens) == served.answer.token_ids
    sequence = RECIPIENT.tolist() + served.answer.token_ids
    expected = by_the_library(model, sequence)[len(RECIPIENT) - 1 : -1]
    torch.testing.assert_close(served.trace.logits, expected, atol=1e-4, rtol=1e-4)


def test_a_dictated_answer_is_followed_and_its_logits_are_the_models_own(
    model: LoadedModel, session: Callable[..., Session]
) -> None:
    forced = tokens(9, 5).tolist()
    served = session().serve(RECIPIENT, 5, forced=forced)
    assert served.answer.token_ids == forced == list(served.trace.tokens)
    expected = by_the_library(model, RECIPIENT.tolist() + forced)[len(RECIPIENT) - 1 : -1]
    torch.testing.assert_close(served.trace.logits, expected, atol=1e-4, rtol=1e-4)


def test_a_lent_donor_serves_as_one_that_was_computed_there(
    session: Callable[..., Session],
) -> None:
    computed, lent = session(COPY), session(COPY)
    computed.serve(DONOR, 1)
    lent.lend(DONOR, session().record(DONOR))
    first, second = (each.serve(RECIPIENT, 4) for each in (computed, lent))
    assert first.answer.plan == second.answer.plan != ()
    torch.testing.assert_close(first.trace.logits, second.trace.logits, atol=1e-5, rtol=1e-5)


def test_copies_are_close_and_ablations_are_not(model: LoadedModel) -> None:
    variants = parse_variants("copy/0,zero-mask/0,unrotated/0")
    found = run(model, variants, CASE)
    copy, masked, unrotated = (found.pairs[variant][0] for variant in variants)
    for pair in (copy, masked, unrotated):
        assert pair.fired
        assert pair.identity == 1.0
        assert 0.5 < pair.reused < 1
        assert pair.refreshed == 0
    assert 0 < copy.kl < masked.kl
    assert copy.kl < unrotated.kl
    assert {copy.cold_text} == {masked.cold_text, unrotated.cold_text}


def test_the_same_prompt_again_is_exact(model: LoadedModel) -> None:
    found = run(model, [COPY], Case((RECIPIENT,), RECIPIENT, "?"))
    (pair,) = found.pairs[COPY]
    assert pair.reused > 0.8
    assert not pair.fired
    assert pair.kl < 1e-9
    assert pair.same_top
    assert pair.ppl_ratio == pytest.approx(1, abs=1e-4)
    assert (pair.rouge_l, pair.warm_text) == (1.0, pair.cold_text)


def test_a_rerun_reuses_nothing_and_differs_by_rounding_at_most(model: LoadedModel) -> None:
    found = run(model, [COPY], Case((), RECIPIENT, "?"), scenario=replace(SCENARIO, rerun=True))
    (pair,) = found.pairs[RERUN]
    assert (pair.reused, pair.fired) == (0, False)
    assert pair.kl < 1e-9


def test_rounded_reuses_nothing_and_differs_by_its_rounding(model: LoadedModel) -> None:
    [variant] = parse_variants("rounded")
    (pair,) = run(model, [variant], CASE).pairs[variant]
    assert (pair.reused, pair.fired) == (0, False)
    assert 1e-9 < pair.kl < 0.01


def test_no_case_profits_from_an_earlier_one(model: LoadedModel) -> None:
    stranger = Case((tokens(7, 100),), RECIPIENT, "?")
    found = run(model, [COPY], CASE, CASE, stranger)
    first, second, third = found.pairs[COPY]
    assert (second.reused, second.kl) == (first.reused, first.kl)
    assert (third.reused, third.fired) == (0, False)


def test_where_caches_live_on_earlier_cases_are_the_donors(model: LoadedModel) -> None:
    scenario = replace(SCENARIO, lives=True)
    found = run(model, [COPY], Case((), DONOR, "?"), Case((), RECIPIENT, "?"), scenario=scenario)
    first, second = found.pairs[COPY]
    assert (first.fired, second.fired) == (False, True)
    assert second.identity == 1.0
    assert second.kl > 0


def test_a_warm_answer_that_goes_astray_is_led_along_the_cold_one(
    model: LoadedModel, session: Callable[..., Session]
) -> None:
    variant = Variant("zero-mask")
    (pair,) = run(model, [variant], CASE).pairs[variant]
    assert pair.warm_text != pair.cold_text
    cold = session().serve(RECIPIENT, 6).trace
    warm = session(variant)
    warm.lend(DONOR, session().record(DONOR))
    led = warm.serve(RECIPIENT, 6, forced=cold.tokens).trace
    chosen = torch.tensor(cold.tokens)[:, None]
    gained = [each.logits.double().log_softmax(-1).gather(1, chosen).mean() for each in (cold, led)]
    assert pair.ppl_ratio == pytest.approx(float((gained[0] - gained[1]).exp()), rel=1e-4)


def test_variants_that_make_no_sense_in_a_scenario_do_not_run() -> None:
    variants = parse_variants("zero-mask,copy")
    assert variants_of(SCENARIO, variants) == variants
    assert variants_of(replace(SCENARIO, all_variants=False), variants) == [COPY]
    assert variants_of(replace(SCENARIO, rerun=True), variants) == [RERUN]


def test_the_outermost_layers_are_masked_one_at_least_at_each_end() -> None:
    assert outer_layers(3) == {0, 2}
    assert outer_layers(30) == {0, 1, 2, 3, 26, 27, 28, 29}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("copy/0.2", "budget of copy is 0"),
        ("copy/much", "strategy/budget"),
        ("seams/1.5", "share from 0 to 1"),
        ("bogus/9", "there is no 'bogus'; there are mix"),
    ],
)
def test_a_variant_that_is_none_ends_in_words(text: str, words: str) -> None:
    with pytest.raises(KvweaveError, match=words):
        parse_variants(text)


def test_one_probe_watches_one_request(session: Callable[..., Session]) -> None:
    recorder = session().recorder
    two = type("Two", (), {"forward": lambda *_: torch.zeros(2, 5)})()
    recorder.runner = two
    batch = type("Batch", (), {"logits_at": np.arange(2)})()
    with pytest.raises(KvweaveError, match="one request"):
        recorder.forward(batch)
