"""Tests of the planner: pieces against the rules, and refusals with their reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.planner import plan_spans, why_not_planned
from kvweave.fuzzy.provider import Candidate
from support.fuzzy_world import SMALL

FREE = replace(SMALL, sink_tokens=0, min_suffix=1)


def run(start: int, end: int, donor_start: int = 1000, page: int = 0) -> Candidate:
    return Candidate(start, end - start, page, donor_start)


def plan(
    *runs: Candidate, length: int = 100, exact: int = 0, config: FuzzyConfig = FREE, **more: Any
) -> list[tuple[int, int, int]]:
    """As (start, end, donor_start)."""
    pieces = plan_spans(runs, length, exact, replace(config, **more))
    return [(piece.start, piece.end, piece.donor_start) for piece in pieces]


RUNS = st.lists(
    st.builds(
        lambda start, length, donor, page: Candidate(start, length, page, donor),
        st.integers(0, 70),
        st.integers(1, 40),
        st.integers(0, 50),
        st.integers(0, 3),
    ),
    max_size=7,
)


@settings(max_examples=300, deadline=None)
@given(RUNS, st.integers(0, 20), st.integers(0, 4), st.integers(1, 9), st.floats(0, 1))
def test_pieces_keep_every_rule_and_cover_nearly_all(
    runs: list[Candidate], exact: int, sinks: int, suffix: int, most: float
) -> None:
    config = replace(SMALL, sink_tokens=sinks, min_suffix=suffix, max_share=most)
    length, shortest = 80, config.min_span
    pieces = plan_spans(runs, length, exact, config)
    behind = max(exact, sinks)
    for piece in pieces:
        assert piece.length >= shortest
        assert behind <= piece.start
        assert piece.end <= length - suffix
        assert piece.donor_start >= sinks
        assert any(
            one.page == piece.page
            and one.start <= piece.start
            and piece.end <= one.end
            and piece.start - one.start == piece.donor_start - one.donor_start
            for one in runs
        )
        behind = piece.end
    served = sum(piece.length for piece in pieces)
    assert served <= most * length
    if most == 1:
        assert served > best_possible(runs, length, exact, config) - shortest


def best_possible(runs: list[Candidate], length: int, exact: int, config: FuzzyConfig) -> int:
    """The most that any choice of pieces serves: try every end of every piece."""
    sinks, shortest = config.sink_tokens, config.min_span
    low, high = max(exact, sinks), length - config.min_suffix
    usable = [
        (max(low, one.start, one.start + sinks - one.donor_start), min(high, one.end))
        for one in runs
        if (one.start, one.donor_start) != (0, 0)
    ]
    best = [0] * (length + 1)
    for end in range(1, length + 1):
        choices = [
            best[start] + end - start
            for first, last in usable
            if end <= last
            for start in range(first, end - shortest + 1)
        ]
        best[end] = max(best[end - 1], *choices, 0)
    return best[length]


def test_recipients_sinks_and_suffix_are_computed() -> None:
    config = {"sink_tokens": 4, "min_suffix": 8}
    assert plan(run(0, 100), **config) == [(4, 92, 1004)]


def test_a_donors_first_tokens_are_never_lent() -> None:
    assert plan(run(50, 90, donor_start=0), sink_tokens=4) == [(54, 90, 4)]
    assert plan(run(50, 90, donor_start=3), sink_tokens=4) == [(51, 90, 4)]


def test_nothing_below_the_exact_prefix_is_served_and_positions_stay_absolute() -> None:
    assert plan(run(10, 60, donor_start=200), exact=32) == [(32, 60, 222)]


def test_the_prompts_own_prefix_is_left_to_the_exact_tier() -> None:
    assert plan(run(0, 90, donor_start=0)) == []
    assert plan(run(40, 90, donor_start=40)) == [(40, 90, 40)]


def test_few_seams_the_run_that_reaches_furthest_goes_on() -> None:
    runs = [run(10, 50, 100), run(12, 30, 200), run(40, 80, 300), run(20, 60, 400)]
    assert plan(*runs) == [(10, 50, 100), (50, 80, 310)]


def test_a_short_rest_borrows_from_the_piece_before() -> None:
    assert plan(run(10, 50, 100), run(40, 54, 200)) == [(10, 46, 100), (46, 54, 206)]


def test_a_short_rest_is_left_when_the_piece_before_cannot_spare_any() -> None:
    assert plan(run(10, 19, 100), run(12, 22, 200)) == [(10, 19, 100)]


def test_the_longest_pieces_come_first_when_the_share_is_bounded() -> None:
    runs = [run(10, 20, 100), run(30, 70, 200)]
    assert plan(*runs, max_share=0.45) == [(30, 70, 200)]
    assert plan(*runs, max_share=0.3) == [(30, 60, 200)]
    assert plan(*runs, max_share=0) == []


def test_too_little_reuse_is_none() -> None:
    assert plan(run(10, 30), min_reuse_ratio=0.2) == [(10, 30, 1000)]
    assert plan(run(10, 30), min_reuse_ratio=0.21) == []


@settings(max_examples=300, deadline=None)
@given(RUNS.filter(bool), st.integers(0, 20), st.integers(0, 9), st.floats(0, 1), st.floats(0, 1))
def test_a_run_is_refused_with_a_reason_exactly_if_nothing_of_it_is_planned(
    runs: list[Candidate], exact: int, sinks: int, most: float, least: float
) -> None:
    config = replace(SMALL, sink_tokens=sinks, max_share=most, min_reuse_ratio=least)
    for candidate in runs:
        if candidate.start == candidate.donor_start == 0:
            continue
        found = why_not_planned(candidate, 80, exact, config)
        assert (found is None) == bool(plan_spans([candidate], 80, exact, config))
        assert found is None or found.reason


def test_the_gate_that_refuses_is_the_first_one_met() -> None:
    def gate(candidate: Candidate, **more: Any) -> str | None:
        found = why_not_planned(candidate, 100, 0, replace(FREE, **more))
        return found.gate if found else None

    assert gate(run(10, 10 + FREE.min_span)) is None
    assert gate(run(10, 9 + FREE.min_span)) == "min-span"
    assert gate(run(0, 10, donor_start=5), sink_tokens=9) == "edges"
    assert gate(run(90, 100), min_suffix=5) == "edges"
    assert gate(run(10, 30), max_share=0.01) == "max-share"
    assert gate(run(10, 30), min_reuse_ratio=0.5) == "min-reuse"
