"""The check of served positions tells right tokens from wrong ones."""

from __future__ import annotations

import numpy as np

from kvweave.engine.types import Usage
from kvweave.prefix.lease import Reuse, Span
from kvweave_bench.driver import Answer
from kvweave_bench.identity import Donors, served_positions

DONOR = np.arange(1000, 1100, dtype=np.int32)


def answered(prompt: np.ndarray, *spans: Span, cached: int = 0) -> Answer:
    usage = Usage(prompt_tokens=len(prompt), reuse=Reuse(exact=cached))
    return Answer(prompt, [7], [0.1], usage, spans)


def recipient() -> np.ndarray:
    return np.concatenate([np.arange(10), DONOR[20:80], np.arange(5)]).astype(np.int32)


def test_a_span_is_right_where_the_donor_holds_the_prompts_tokens() -> None:
    donors = Donors()
    donors.add(answered(DONOR))
    right = answered(recipient(), Span(10, 60, 1, 20))
    assert donors.identity(right) == 1.0


def test_a_span_one_position_off_is_wrong_everywhere() -> None:
    donors = Donors()
    donors.add(answered(DONOR))
    shifted = answered(recipient(), Span(10, 60, 1, 21))
    assert donors.identity(shifted) == 0.0


def test_a_span_reaching_past_the_shared_run_or_the_donor_is_wrong_in_part() -> None:
    donors = Donors()
    donors.add(answered(DONOR))
    assert donors.identity(answered(recipient(), Span(5, 60, 1, 15))) == 55 / 60
    short = Donors()
    short.add(answered(DONOR[:50]))
    assert short.identity(answered(recipient(), Span(10, 60, 1, 20))) == 30 / 60


def test_without_donors_everything_served_is_wrong_and_nothing_served_is_right() -> None:
    assert Donors().identity(answered(recipient(), Span(10, 60, 1, 20))) == 0.0
    assert Donors().identity(answered(recipient())) == 1.0


def test_what_was_served_from_elsewhere_is_lent_only_up_to_there() -> None:
    donors = Donors()
    donors.add(answered(np.concatenate([DONOR, DONOR + 500]), Span(40, 100, 1, 0)))
    assert donors.oracle_share(DONOR[:40]) == 1.0
    assert donors.oracle_share(DONOR[40:]) == 0.0


def test_served_positions_are_the_exact_prefix_and_all_spans() -> None:
    answer = answered(recipient(), Span(20, 5, 1, 0), Span(30, 2, 1, 9), cached=16)
    assert np.flatnonzero(served_positions(answer)).tolist() == [*range(16), *range(20, 25), 30, 31]
