"""Parts of the explorer: runs of sources, the bounded history, shared text."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.engine.types import GenerateRequest, OutputDelta, Usage
from kvweave.explorer.history import SOURCES, History, Record, counts, source_runs
from kvweave.explorer.queries import SURE_TO_BE_FOUND, pieces, prompt_view, shared_runs
from kvweave.kv.pool import runs_of
from kvweave.prefix.lease import Plan, Reuse, Span, Tier
from kvweave.server.metrics import Metrics, RequestMetrics
from kvweave.server.responses import TokenTexts


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=5),
    st.integers(0, 10),
    st.data(),
)
def test_runs_say_of_every_token_what_the_plan_says(gaps, exact, data):
    spans, reached = [], exact
    for gap, length in gaps:
        spans.append(Span(reached + gap, length, 1, 100 * len(spans)))
        reached = spans[-1].end
    inside = [at for span in spans for at in range(span.start, span.end)]
    recompute = data.draw(st.lists(st.sampled_from(inside), unique=True) if inside else st.just([]))
    plan = Plan(reached + 3, exact, tuple(spans), np.array(sorted(recompute), np.int32))

    runs = source_runs(plan.length, exact, plan.spans, runs_of(plan.recompute))
    named = [run.source for run in runs for _ in range(run.length)]
    assert len(named) == plan.length
    assert [run.start for run in runs] == [
        sum(other.length for other in runs[:at]) for at in range(len(runs))
    ]
    for at, source in enumerate(named):
        if at < exact:
            assert source == "exact"
        elif at in recompute:
            assert source == "refreshed"
        else:
            assert source == ("moved" if at in inside else "fresh")
    for run in runs:
        if run.span is not None:
            assert run.donor_start == run.span.donor_start + run.start - run.span.start
    assert sum(counts(runs).values()) == plan.length
    assert set(counts(runs)) == set(SOURCES)


def test_a_plan_made_when_a_request_came_back_does_not_overlap_what_was_counted_before():
    runs = source_runs(50, 32, [Span(16, 20, 1, 0)], [])
    assert [(run.source, run.start, run.length) for run in runs] == [
        ("exact", 0, 16),
        ("moved", 16, 20),
        ("fresh", 36, 14),
    ]


def ended(history, prompt, rid="r", answered=True):
    request = GenerateRequest(rid=rid, prompt_ids=tuple(prompt))
    metrics = RequestMetrics(request, Metrics("m", lambda: None), endpoint="test", observer=history)
    if answered:
        usage = Usage(prompt_tokens=len(request.prompt_ids), reuse=Reuse(exact=1))
        metrics.note(OutputDelta("r", 0, "x", (7,), usage))
    metrics.close()
    metrics.close()
    return history


def test_the_history_keeps_so_many_prompts_and_so_many_tokens():
    history = History(most_prompts=3, most_tokens=100)
    for number in range(5):
        ended(history, [number] * 10)
    assert [record.number for record in history] == [3, 4, 5]
    assert history.oldest == 3
    assert history.get(2) is None
    assert history.get(6) is None
    assert history.get(4).prompt.tolist() == [3] * 10
    assert history.get(4).answer.tolist() == [7]
    ended(history, [0] * 80)
    assert [record.number for record in history] == [5, 6], "11 + 81 tokens fit, 22 + 81 do not"
    ended(history, [0] * 500)
    assert [record.number for record in history] == [7], "the newest stays, however long"


def test_a_prompt_without_a_token_has_no_first_token_time():
    """The page counts only the others: it may never have been looked up in the cache."""
    assert ended(History(), [1, 2, 3], answered=False).get(1).first_token is None


def record(number, tokens, *, spans=(), exact=0, salt=None):
    return Record(
        number=number,
        rid=str(number),
        endpoint="test",
        salt=salt,
        fuzzy=True,
        prompt_length=len(tokens),
        tokens=np.array(tokens, np.int32),
        exact=exact,
        spans=spans,
        refreshed=(),
        arrived=float(number),
        first_token=0.1,
        total=0.2,
        outcome="stop",
    )


def random_tokens(seed, length):
    return np.random.default_rng(seed).integers(1000, 50_000, length).tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(SURE_TO_BE_FOUND, 90), st.integers(0, 60), st.integers(0, 60), st.integers(0, 99)
)
def test_a_shared_run_is_found_whole_wherever_it_is(length, before, there, seed):
    run = random_tokens(seed, length)
    donor = record(1, random_tokens(seed + 1000, there) + run + [1, 2, 3])
    prompt = record(2, random_tokens(seed + 2000, before) + run + [4, 5, 6])
    [found] = shared_runs(prompt, [record(0, random_tokens(seed + 3000, 50)), donor], 5)
    assert (found.donor, found.start, found.length, found.donor_start) == (
        *(donor, before),
        *(length, there),
    )


def test_only_what_was_computed_is_asked_about():
    text = random_tokens(1, 100)
    prompt = record(2, text, exact=16, spans=(Span(20, 40, 1, 20),))
    [found] = shared_runs(prompt, [record(1, text)], 5)
    assert (found.start, found.length) == (60, 40)


def test_all_parts_of_a_run_that_were_computed_are_found():
    text = random_tokens(1, 100)
    prompt = record(2, text, exact=16, spans=(Span(40, 30, 1, 40),))
    found = shared_runs(prompt, [record(1, text)], 5)
    assert [(run.start, run.length) for run in found] == [(70, 30), (16, 24)]


def test_what_could_have_been_lent_counts_more_than_what_never_could():
    text = random_tokens(1, 60)
    salted, plain = record(1, text, salt="s"), record(0, [9, *text[:50]])
    [found] = shared_runs(record(2, text), [salted, plain], 1)
    assert found.donor is plain


@pytest.mark.parametrize("text", ["plain", "grüße, 世界, 🙂!"])
def test_pieces_make_the_whole_text_and_never_half_a_character(text):
    from support.serverkit import toy_tokenizer

    tokenizer = toy_tokenizer()
    ids = tokenizer(text)["input_ids"]
    found = pieces(TokenTexts(tokenizer), ids)
    assert "".join(found) == text
    assert len(found) == len(ids) == len(text.encode())
    broken = pieces(TokenTexts(tokenizer), ids[:-1])
    assert len(broken) == len(ids) - 1


def test_a_paraphrase_is_shown_with_the_prompt_on_its_node_and_refreshed_tokens_with_theirs():
    text = random_tokens(1, 60)
    spans = (Span(4, 20, 8, 2, Tier.PARAPHRASE), Span(30, 20, 9, 10))
    lent = replace(record(3, text, spans=spans), refreshed=((30, 5),))
    donor = record(1, [*range(10), *text[30:50]])
    blocks = prompt_view(lent, [donor], {8: 2}, None)["blocks"]
    told = [(b["source"], b["start"], b.get("donor"), b.get("donor_start")) for b in blocks]
    assert told == [
        ("fresh", 0, None, None),
        ("paraphrase", 4, 2, 2),
        ("fresh", 24, None, None),
        ("refreshed", 30, 1, 10),
        ("moved", 35, 1, 15),
        ("fresh", 50, None, None),
    ]


def test_a_run_from_the_session_s_own_approximate_kv_is_marked():
    text = random_tokens(1, 60)
    spans = (Span(4, 20, 8, 2), Span(30, 20, 1, 10, generation=2))
    blocks = prompt_view(record(3, text, spans=spans), [], {}, None)["blocks"]
    assert [block.get("generation") for block in blocks] == [None, None, None, 2, None]


def test_a_run_says_how_much_of_it_is_read_in_its_donor_s_pages():
    spans = (Span(4, 40, 8, 2, shared=32), Span(50, 9, 9, 10))
    lent = replace(record(3, random_tokens(1, 60), spans=spans), refreshed=((4, 5),))
    blocks = prompt_view(lent, [], {}, None)["blocks"]
    told = [(block["source"], block.get("shared")) for block in blocks]
    assert told == [
        ("fresh", None), ("refreshed", None), ("moved", 32), ("fresh", None), ("moved", None),
        ("fresh", None),
    ]  # fmt: skip


def test_a_donor_that_was_healed_meanwhile_is_still_named():
    text = random_tokens(1, 60)
    approximate = record(1, [*range(10), *text], spans=(Span(2, 4, 1, 30),))
    lent = record(2, [7, *text], spans=(Span(1, 50, 1, 10),))
    [_, block, _] = prompt_view(lent, [approximate], {}, None)["blocks"]
    assert block["donor"] == 1
