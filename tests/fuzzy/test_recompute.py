"""What is chosen for recomputing before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import IntegrityError
from kvweave.fuzzy.recompute import STRATEGIES, choose
from kvweave.prefix.lease import DeferredRecompute, Plan, Span, Tier

EDITED = (
    Span(10, 100, 1, 20),
    Span(115, 40, 1, 125),  # five tokens differ before it
    Span(200, 300, 2, 7),  # other text
)


@st.composite
def some_spans(draw: st.DrawFn) -> tuple[Span, ...]:
    spans: list[Span] = []
    at = draw(st.integers(0, 9))
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 80))
        spans.append(Span(at, length, 1, draw(st.integers(0, 300))))
        at += length + draw(st.integers(0, 90))
    return tuple(spans)


@given(some_spans(), st.floats(0, 1), st.sampled_from(sorted(STRATEGIES)))
def test_the_budget_is_kept_to_the_token(spans, share, strategy):
    recompute, deferred = choose(spans, share, strategy)
    budget = round(share * sum(span.length for span in spans))
    assert len(recompute) + (deferred.budget if deferred else 0) == budget
    assert np.all(np.diff(recompute) > 0)
    inside = {at for span in spans for at in range(span.start, span.end)}
    assert set(recompute.tolist()) <= inside
    plan = Plan(spans[-1].end + 1, 0, spans, recompute, deferred)
    assert plan.recomputed == budget
    assert plan.served == len(inside) - budget


@given(some_spans(), st.floats(0, 1))
def test_seams_get_equal_heads_as_far_as_spans_reach(spans, share):
    recompute, deferred = choose(spans, share, "seams")
    assert deferred is None
    heads = [int(np.sum((recompute >= s.start) & (recompute < s.end))) for s in spans]
    for span, head in zip(spans, heads, strict=True):
        assert np.isin(np.arange(span.start, span.start + head), recompute).all(), "not its head"
    # Whoever is below the others is used up, or was given more only for standing behind an edit.
    lowest = min((h for h, s in zip(heads, spans, strict=True) if h < s.length), default=None)
    if lowest is not None:
        assert max(heads) <= max(lowest + 1, 8)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_whatever_the_strategy_what_follows_an_edit_comes_first(strategy):
    recompute, deferred = choose(EDITED, 4 / 440, strategy)
    assert recompute.tolist() == [115, 116, 117, 118]
    assert deferred is None
    recompute, deferred = choose(EDITED, 0.1, strategy)
    assert set(range(115, 123)) <= set(recompute.tolist())


def test_other_text_between_two_spans_is_no_edit():
    recompute, deferred = choose((EDITED[0], EDITED[2]), 0.01, "mix")
    assert (len(recompute), deferred) == (0, DeferredRecompute("mix", 4))


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_other_words_are_served_whole(strategy):
    """Half of a sentence in its own words and half in another's may say what neither says."""
    words = Span(112, 6, 1, 120, Tier.PARAPHRASE)
    spans = (EDITED[0], words, Span(118, 40, 1, 126), EDITED[2])
    recompute, deferred = choose(spans, 0.5, strategy)
    plan = Plan(600, 0, spans, recompute, deferred)
    assert not np.isin(np.arange(words.start, words.end), plan.compute).any()
    assert plan.recomputed == plan.served_by(Tier.MOVED) == 220
    assert plan.served_by(Tier.PARAPHRASE) == 6
    if plan.candidates is not None:
        assert len(plan.candidates) == len(plan.compute) == 594
    assert choose([words], 0.5, strategy)[1] is None
    assert not len(choose([words], 0.5, strategy)[0])


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_nothing_and_everything(strategy):
    recompute, deferred = choose(EDITED, 0.0, strategy)
    assert (len(recompute), deferred) == (0, None)
    recompute, deferred = choose(EDITED, 1.0, strategy)
    plan = Plan(600, 0, EDITED, recompute, deferred)
    assert (plan.served, plan.recomputed) == (0, 440)


@pytest.mark.parametrize("continued", [0, 1])
def test_of_three_spans_behind_other_text_the_pass_chooses_a_share(continued):
    """By default; of fewer, their first tokens are computed again and nothing else."""
    spans = tuple(Span(100 * at, 90, at, 7) for at in range(3))
    recompute, deferred = choose(spans, None, "mix", 32, spans[:continued])
    if continued:
        assert (len(recompute), deferred) == (2 * 32, None)
    else:
        assert (len(recompute), deferred) == (3 * 8, DeferredRecompute("mix", round(0.1 * 270)))
    recompute, deferred = choose(spans, None, "seams", 32, spans[:continued])
    assert (len(recompute), deferred) == ((3 - continued) * 32, None)
    assert choose(spans, 0.0, "mix", 32)[1] is None
    recompute, deferred = choose(spans, None, "mix", 0)
    assert (len(recompute), deferred) == (0, None)


def test_a_screened_plan_looks_at_everything_behind_the_exact_prefix():
    plan = Plan(600, 8, EDITED, np.array([115, 116], np.int32), DeferredRecompute("mix", 30))
    assert plan.compute.tolist() == list(range(8, 600))
    assert plan.candidates is not None
    served = np.zeros(600, np.bool_)
    for span in EDITED:
        served[span.start : span.end] = True
    served[[115, 116]] = False
    assert np.array_equal(plan.candidates, served[8:])
    assert (plan.recomputed, plan.served, plan.publishable(500)) == (32, 408, 10)


@pytest.mark.parametrize("budget", [0, -1, 441])
def test_a_screen_that_cannot_be_met_is_refused(budget):
    with pytest.raises(IntegrityError):
        Plan(600, 0, EDITED, deferred=DeferredRecompute("mix", budget))


def test_a_depth_is_a_layer_of_any_model_and_never_the_first():
    assert STRATEGIES["deviation"].stops_by_layer(30) == {1: 1.0}
    assert list(STRATEGIES["mix"].stops_by_layer(30)) == [1, 4, 8, 14, 24]
    assert STRATEGIES["mix"].stops_by_layer(3) == {1: 1.0}, "all stops fall together"


def test_the_first_tokens_of_each_span_come_beside_the_share() -> None:
    spans = [Span(10, 100, 1, 0), Span(110, 40, 2, 0), Span(160, 100, 3, 7)]
    chosen, deferred = choose(spans, 0.0, "mix", seam_tokens=32)
    assert chosen.tolist() == [*range(10, 42), *range(110, 130), *range(160, 192)]
    assert deferred is None, "known when the plan is made: no look is taken"
    chosen, deferred = choose(spans, 0.1, "mix", seam_tokens=32)
    assert len(chosen) == 84
    assert deferred is not None
    assert deferred.budget == 24
    chosen, deferred = choose(spans, 0.1, "seams", seam_tokens=32)
    assert len(chosen) == 84 + 24
    assert deferred is None


def test_a_span_whose_earlier_text_is_the_donors_own_has_no_seam() -> None:
    spans = [Span(10, 100, 1, 0), Span(110, 100, 2, 0)]
    chosen, _ = choose(spans, 0.0, "seams", seam_tokens=32, continued=[spans[1]])
    assert chosen.tolist() == list(range(10, 42))
    chosen, _ = choose(spans, 1.0, "seams", seam_tokens=32, continued=[spans[1]])
    assert len(chosen) == 200, "never more than there is"
