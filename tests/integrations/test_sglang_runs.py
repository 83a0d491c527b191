"""Which runs SGLang is lent: whole pages, without a gap, long enough for a chunk's end."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.fuzzy.provider import Candidate
from support import fake_sglang


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, int | bool | list[tuple[int, int, int, bool]] | None]:
    size = draw(st.sampled_from([1, 4, 16]))
    exact = size * draw(st.integers(0, 5))
    pieces, at = [], exact
    for _ in range(draw(st.integers(0, 6))):
        at += draw(st.sampled_from([0, 0, 1, 7, 40]))
        length = draw(st.integers(1, 90))
        pieces.append((at, length, draw(st.integers(0, 300)), draw(st.booleans())))
        at += length
    limit = draw(st.one_of(st.none(), st.integers(exact, at + 20)))
    return {
        "size": size,
        "exact": exact,
        "limit": limit,
        "length": at + 10,
        "refresh": draw(st.integers(0, 40)),
        "least": draw(st.integers(1, 60)),
        "chunked": draw(st.booleans()),
        "pieces": pieces,
    }


@pytest.fixture(scope="module", autouse=True)
def _fake() -> object:
    with fake_sglang.installed():
        yield


@given(_cases())
def test_runs_are_whole_pages_of_the_pieces_and_nothing_else(case: dict) -> None:
    from kvweave.integrations.sglang.checks import PluginConfig
    from kvweave.integrations.sglang.mirror import Piece
    from kvweave.integrations.sglang.runs import runs_of

    spans = [
        Piece(Candidate(start, length, 7, donor), continues)
        for start, length, donor, continues in case["pieces"]
    ]
    config = PluginConfig(
        refresh_tokens=case["refresh"], min_chunk_span=case["least"], min_reuse_ratio=0
    )
    runs = runs_of(
        spans,
        exact=case["exact"],
        length=case["length"],
        limit=case["limit"],
        page_size=case["size"],
        config=config,
        chunked=case["chunked"],
    )
    shift = {  # of every position that may be lent, from the donor's
        at: span.start - span.donor_start for span, _ in spans for at in range(span.start, span.end)
    }
    heads = {
        at
        for span, continues in spans
        if case["chunked"] and not continues
        for at in range(span.start, span.start + min(case["refresh"], span.length // 2))
    }
    end = case["length"] if case["limit"] is None else case["limit"]
    for run in runs:
        assert run.start % case["size"] == run.end % case["size"] == 0
        assert case["exact"] <= run.start < run.end <= end
        assert all(one.end == two.start for one, two in pairwise(run.pieces))
        assert run.start == case["exact"] or run.length >= case["least"]
        assert run.start == case["exact"] or case["chunked"]
        for piece in run.pieces:
            for at in range(piece.start, piece.end):
                assert shift[at] == piece.start - piece.donor_start
                assert at not in heads
    assert all(one.end < two.start for one, two in pairwise(runs)), "else they are one"


def test_too_little_of_a_prompt_is_not_lent() -> None:
    from kvweave.integrations.sglang.checks import PluginConfig
    from kvweave.integrations.sglang.mirror import Piece
    from kvweave.integrations.sglang.runs import runs_of

    piece = Piece(Candidate(10, 99, 0, 50), continues=True)
    asked = {"exact": 0, "limit": None, "page_size": 1, "chunked": True}
    config = PluginConfig(min_reuse_ratio=0.1)
    assert runs_of([piece], length=990, config=config, **asked)
    assert not runs_of([piece], length=991, config=config, **asked)
