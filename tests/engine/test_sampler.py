"""Sampling: distributions, filters, penalties, seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvweave.engine.sampling.logits import keep_min_p, keep_top_k, keep_top_p
from kvweave.engine.sampling.sampler import SamplingState, sample, uniforms
from kvweave.engine.types import SamplingParams


def state(prompt=(), ending=(), seed=0, **params) -> SamplingState:
    params.setdefault("temperature", 1.0)
    tokens = np.array(prompt, np.int32)
    return SamplingState(SamplingParams(**params), tokens, ending, seed)


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * 3


def test_uniform_numbers_are_uniform_independent_and_repeatable():
    counters = np.arange(20_000, dtype=np.uint64)
    drawn = uniforms(np.full(20_000, 12345, np.uint64), counters)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    histogram = np.histogram(drawn, 20, (0, 1))[0]
    assert abs(histogram - 1000).max() < 150
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.03
    neighbours = uniforms(np.full(20_000, 12346, np.uint64), counters)
    assert abs(np.corrcoef(drawn, neighbours)[0, 1]) < 0.03
    assert np.array_equal(drawn[:5], uniforms(np.full(5, 12345, np.uint64), counters[:5]))


def test_samples_follow_the_distribution():
    logits = random_logits(1, 12)
    expected = (logits / 0.7).softmax(-1)[0]
    many = [state(seed=seed, temperature=0.7) for seed in range(8000)]
    drawn = sample(logits.repeat(8000, 1), many).token_ids
    frequency = torch.bincount(torch.tensor(drawn), minlength=12) / 8000
    assert (frequency - expected).abs().max() < 0.02


def test_a_row_does_not_depend_on_its_company():
    logits = random_logits(4, 500)
    kinds = [
        {"temperature": 0.0},
        {"top_k": 7},
        {"top_p": 0.5, "min_p": 0.01},
        {"presence_penalty": 1.0, "logprobs": 2},
    ]
    alone = [
        sample(logits[i : i + 1].clone(), [state(seed=i, **kind)]) for i, kind in enumerate(kinds)
    ]
    together = sample(logits.clone(), [state(seed=i, **kind) for i, kind in enumerate(kinds)])
    assert together.token_ids == [each.token_ids[0] for each in alone]
    assert together.logprobs[3] == alone[3].logprobs[0]
    assert together.logprobs[:3] == [None, None, None]


def test_greedy_needs_no_random_numbers_and_no_sort(monkeypatch):
    monkeypatch.setattr("kvweave.engine.sampling.sampler._draw", None)
    logits = random_logits(3, 100)
    expected = logits.argmax(-1).tolist()
    assert sample(logits, [state(temperature=0.0)] * 3).token_ids == expected


@pytest.mark.parametrize("k", [1, 3, 50, 100, 1000])
def test_top_k_keeps_the_k_likeliest(k):
    logits = random_logits(5, 100)
    kept = logits.clone()
    keep_top_k(kept, torch.tensor([k, 0, k, 2, k]))
    assert kept.isfinite().sum(-1).tolist() == [min(k, 100), 100, min(k, 100), 2, min(k, 100)]
    assert torch.equal(kept.argmax(-1), logits.argmax(-1))
    smallest = kept[0][kept[0].isfinite()].min()
    assert (logits[0][~kept[0].isfinite()] < smallest).all()


@pytest.mark.parametrize("vocabulary", [10, 256, 300, 5000])
@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_top_p_keeps_the_fewest_that_reach_the_mass(vocabulary, scale):
    """Flat distributions need more candidates than the first look has; steep ones few."""
    logits = random_logits(6, vocabulary) * scale
    wanted = [0.0001, 0.1, 0.5, 0.9, 0.999, 1.0]
    kept = logits.clone()
    keep_top_p(kept, torch.tensor(wanted))
    for row, mass in enumerate(wanted):
        ordered = logits[row].double().softmax(-1).sort(descending=True).values
        fewest = vocabulary if mass == 1 else int((ordered.cumsum(-1) < mass).sum()) + 1
        found = int(kept[row].isfinite().sum())
        assert abs(found - fewest) <= (fewest > 250), "up to rounding of the sums"
        assert kept[row].argmax() == logits[row].argmax()


def test_min_p_drops_what_is_unlikely_beside_the_best():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(2, 1)
    keep_min_p(logits, torch.tensor([0.2, 0.0]))
    assert logits.isfinite().tolist() == [[True, True, True, False], [True] * 4]


def test_filters_apply_one_after_another():
    """top_p sees what top_k left: of (0.5, 0.3) the first has 0.625 of the mass."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(200, 1)
    states = [state(seed=seed, top_k=2, top_p=0.6) for seed in range(200)]
    assert set(sample(logits, states).token_ids) == {0}


def test_penalties_are_those_of_the_api_reference():
    base = random_logits(1, 20)
    penalised = state(
        prompt=[1, 2, 2],
        temperature=0.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias={4: 3.0, 5: -3.0},
    )
    for token in (2, 7, 7, 7):
        penalised.record(token)
    logits = base.clone()
    sample(logits, [penalised])
    expected = base[0].clone()
    for token in (1, 2, 7):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    expected[2] -= 0.5 + 0.25
    expected[7] -= 0.5 + 0.25 * 3
    expected[4] += 3
    expected[5] -= 3
    assert torch.allclose(logits[0], expected, atol=1e-6)


def test_counts_grow_past_their_first_room():
    counted = state(prompt=range(50), presence_penalty=1.0, repetition_penalty=1.1)
    for token in range(400):
        counted.record(token % 300)
    counts = counted.adjuster._counts
    assert counts.ids.tolist() == list(range(300))
    assert counts.counts.tolist() == [2.0] * 100 + [1.0] * 200


def test_min_tokens_make_the_end_impossible_until_they_are_there():
    logits = torch.zeros(1, 10)
    logits[0, 3], logits[0, 4], logits[0, 5] = 9, 8, 7
    waits = state(ending={3, 4}, temperature=0.0, min_tokens=2)
    for expected in (5, 5, 3):
        token = sample(logits.clone(), [waits]).token_ids[0]
        assert token == expected
        waits.record(token)


def test_only_allowed_tokens_are_drawn():
    logits = random_logits(3, 50)
    allowed = state(temperature=0.0, allowed_token_ids=(7, 3, 7))
    biased = state(temperature=0.0, allowed_token_ids=(7, 3), logit_bias={3: 100, 9: 100})
    free = state(temperature=0.0)
    expected = [7 if logits[0, 7] > logits[0, 3] else 3, 3, int(logits[2].argmax())]
    assert sample(logits.clone(), [allowed, biased, free]).token_ids == expected
    many = [state(seed=seed, allowed_token_ids=(7, 3), temperature=2.0) for seed in range(200)]
    assert set(sample(torch.zeros(200, 50), many).token_ids) == {3, 7}


def test_a_bad_word_is_never_completed_and_its_beginning_may_stay():
    bad = state(temperature=0.0, bad_words_ids=((4,), (5, 6, 7), (7, 7)))
    liked = torch.tensor([[0.0, 0, 0, 0, 9, 5, 6, 7]])
    drawn = []
    for wanted in (4, 5, 6, 7, 5, 6, 5, 7):
        logits = liked.clone()
        logits[0, wanted] += 20
        [token] = sample(logits, [bad]).token_ids
        bad.record(token)
        drawn.append(token)
    # 4 is never drawn, 7 not after 5, 6 nor after itself.
    assert drawn == [7, 5, 6, 6, 5, 6, 5, 7]


def test_a_request_that_leaves_no_token_says_so():
    none = state(allowed_token_ids=(3,), bad_words_ids=((3,),))
    sampled = sample(random_logits(2, 50), [none, state()])
    assert "leaves no token to choose" in str(sampled.errors[0])
    assert 1 not in sampled.errors


def test_a_row_of_nonsense_is_named_and_the_others_are_sampled():
    logits = random_logits(3, 10)
    logits[0, 4] = float("nan")
    logits[2] = -float("inf")
    for temperature in (0.0, 1.0):
        found = sample(logits.clone(), [state(temperature=temperature, seed=1)] * 3)
        assert set(found.errors) == {0, 2}
        alone = sample(logits[1:2].clone(), [state(temperature=temperature, seed=1)])
        assert found.token_ids[1] == alone.token_ids[0]


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((2000, 50), -torch.inf)
    logits[:, [7, 49]] = 0.0
    drawn = sample(logits, [state(seed=seed) for seed in range(2000)]).token_ids
    assert set(drawn) == {7, 49}


def test_the_smallest_random_number_draws_a_possible_token(monkeypatch):
    monkeypatch.setattr("kvweave.engine.sampling.sampler.uniforms", lambda *_: np.zeros(1))
    logits = torch.full((1, 50), -torch.inf)
    logits[0, [7, 49]] = 0.0
    assert sample(logits, [state()]).token_ids == [7]


def test_every_token_of_an_answer_has_a_random_number_of_its_own():
    drawing = state(seed=3)
    drawn = []
    for _ in range(50):
        drawn += sample(torch.zeros(1, 1000), [drawing]).token_ids
        drawing.record(drawn[-1])
    assert len(set(drawn)) > 40


def test_a_large_vocabulary_keeps_its_rare_tokens(monkeypatch):
    """The likeliest has all but 3e-6 of the mass; float32 sums could not tell the others apart."""
    logits = torch.zeros(1, 200_000)
    logits[0, 0] = 25.0
    tail = 200_000 * np.exp(-25.0)
    for place in (0.25, 0.5, 0.75):
        drawn = np.array([1 - tail * (1 - place)])
        monkeypatch.setattr(
            "kvweave.engine.sampling.sampler.uniforms", lambda *_, drawn=drawn: drawn
        )
        token = sample(logits.clone(), [state()]).token_ids[0]
        assert token == pytest.approx(200_000 * place, rel=0.02)
