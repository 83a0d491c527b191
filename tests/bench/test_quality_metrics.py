"""The arithmetic of bench quality: divergences, texts, facts, intervals."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch

from kvweave.engine.selfcheck.measure import kl_divergence, verdict, words
from kvweave_bench.quality.metrics import (
    bootstrap,
    negative_log_likelihood,
    perplexity_ratio,
    rouge_l,
    share,
    token_f1,
)

TEXTS = [
    "The capital of Peru is Lima.",
    "Lima is the capital of Peru, and its largest city.",
    "It has 1024 rows; they're numbered from 0 to 1023.",
    "the the the cat",
    "The cat sat.",
    "Nothing",
    "",
]


def test_divergence_of_two_coins() -> None:
    cold = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    warm = torch.tensor([[math.log(3.0), 0.0], [math.log(3.0) + 5, 5.0]])
    fair_from_loaded = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert kl_divergence(cold, warm).tolist() == pytest.approx([fair_from_loaded, 0.0])
    assert kl_divergence(warm, cold)[0] != pytest.approx(fair_from_loaded)


def test_divergence_from_itself_is_no_rounding_noise() -> None:
    logits = 20 * torch.randn(4, 50_000, generator=torch.Generator().manual_seed(1))
    shifted = logits + 3.0
    assert float(kl_divergence(logits, shifted).max()) < 1e-9


def test_perplexity_ratio_compares_along_the_given_tokens() -> None:
    cold, warm = torch.zeros(2, 4), torch.tensor([[0.0, 0.0, 0.0, math.log(5.0)], [0.0] * 4])
    assert negative_log_likelihood(cold, [0, 3]) == pytest.approx(math.log(4))
    # Token 0 is half as likely warm, the second token as likely as cold.
    assert perplexity_ratio(cold, warm, [0, 3]) == pytest.approx(math.sqrt(2))
    assert perplexity_ratio(cold, warm, [3, 3]) == pytest.approx(math.sqrt(0.25 / 0.625))


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        ("police killed the gunman", "police kill the gunman", 0.75),
        ("police killed the gunman", "the gunman kill police", 0.5),
        ("a b c d", "", 0.0),
        ("", "", 1.0),
        ("Lima", "lima!", 1.0),
    ],
)
def test_rouge_l_of_known_pairs(reference: str, answer: str, expected: float) -> None:
    assert rouge_l(reference, answer) == pytest.approx(expected)


def test_rouge_l_is_what_the_reference_implementation_says() -> None:
    if importlib.util.find_spec("rouge_score") is None:
        pytest.skip("package rouge-score is not installed; the known pairs were compared")
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    for reference in TEXTS[:-1]:
        for answer in TEXTS[:-1]:
            theirs = scorer.score(reference, answer)["rougeL"].fmeasure
            assert rouge_l(reference, answer) == pytest.approx(theirs), (reference, answer)


def test_token_f1_counts_words_however_ordered_and_no_more_often_than_they_occur() -> None:
    assert token_f1("the gunman killed police", "police killed the gunman") == 1.0
    assert token_f1("the cat", "the the the cat") == pytest.approx(2 * 2 / 6)
    assert token_f1("Lima", "Quito") == 0.0


def test_words_are_letters_and_digits_without_thousands_separators() -> None:
    assert words("KX-4821: 26,023,100 people, São Tomé") == [
        *("kx", "4821", "26023100", "people", "são", "tomé"),
    ]
    assert words("1,2 or 3,4567") == ["1", "2", "or", "3", "4567"]


@pytest.mark.parametrize(
    ("answer", "gold", "decoy", "expected"),
    [
        ("It is Lima.", "Lima", "Quito", "gold"),
        ("It is Quito, not Lima.", "Lima", "Quito", "decoy"),
        ("Lima. Question: Quito?", "Lima", "Quito", "gold"),
        ("It is Limassol.", "Lima", "Quito", "neither"),
        ("85 feet", "85 metres", "85 feet", "decoy"),
        ("it may not", "may", "may not", "decoy"),
        ("it may not", "may not", "may", "gold"),
        ("26,023,100 people", "26023100", None, "gold"),
        ("", "Lima", None, "neither"),
        ("No, no refunds", "yes", "no", "decoy"),
    ],
)
def test_the_fact_that_an_answer_gives_first(
    answer: str, gold: str, decoy: str | None, expected: str
) -> None:
    assert verdict(answer, gold, decoy) == expected


def test_shares_are_unsure_even_at_none_and_all() -> None:
    # Wilson's interval at 90 %: none of 30 leaves z^2 / (n + z^2) open.
    none, every = share(0, 30), share(30, 30)
    assert (none.value, none.low, none.n) == (0.0, 0.0, 30)
    assert none.high == pytest.approx(2.7055 / 32.7055, rel=1e-3)
    assert (every.value, every.high) == (1.0, 1.0)
    assert every.low == pytest.approx(1 - none.high)


@pytest.mark.parametrize("statistic", ["mean", "median", "p95"])
def test_bootstrap_gives_the_statistic_itself_and_surrounds_it(statistic: str) -> None:
    figures = np.random.default_rng(3).exponential(size=60)
    expected = {
        "mean": figures.mean(),
        "median": np.median(figures),
        "p95": np.percentile(figures, 95),
    }
    found = bootstrap(figures.tolist(), statistic)  # type: ignore[arg-type]
    assert found.value == pytest.approx(expected[statistic])
    assert found.low < found.value < found.high
    assert bootstrap([2.0] * 5, statistic) == (2.0, 2.0, 2.0, 5)  # type: ignore[arg-type]


def test_nine_of_ten_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(0)
    held_means = held_shares = 0
    for _ in range(200):
        mean = bootstrap(rng.exponential(size=50).tolist())
        held_means += mean.low <= 1.0 <= mean.high
        proportion = share(int(rng.binomial(50, 0.1)), 50)
        held_shares += proportion.low <= 0.1 <= proportion.high
    assert 160 <= held_means <= 196
    assert 160 <= held_shares <= 196
