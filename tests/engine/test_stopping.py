"""Stop strings: found wherever token borders fall, cut right, never shown in part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.engine.output import StopMatcher
from support.enginekit import make_world, oracle_answer, prompt, request

SHORT = st.text("ab", min_size=1, max_size=4)


def first_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop string to be complete ends; the longest, if several end there."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return end, max(ended, key=len)
    return None


@given(st.lists(st.text("abc", max_size=3), max_size=12), st.lists(SHORT, min_size=1, max_size=3))
def test_equals_searching_the_whole_text(pieces, stops):
    text = "".join(pieces)
    found = first_end(text, stops)
    for include in (False, True):
        matcher = StopMatcher(stops, include)
        shown = ""
        for piece in pieces:
            shown += matcher.feed(piece)
            assert text.startswith(shown)
            if matcher.matched is not None:
                break
        if found is None:
            assert matcher.matched is None
            assert shown + matcher.finish() == text
        else:
            end, stop = found
            assert matcher.matched == stop
            assert shown == (text[:end] if include else text[: end - len(stop)])
            assert matcher.finish() == ""


@given(st.lists(st.text("abc", max_size=3), max_size=12), st.lists(SHORT, min_size=1, max_size=3))
def test_holds_back_only_beginnings_of_stop_strings(pieces, stops):
    matcher, text, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        text += piece
        shown += matcher.feed(piece)
        if matcher.matched is not None:
            return
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "<s>"]), max_size=12),
    st.lists(st.sampled_from(["a<s>", "<s>b", "<s>", "bb", "ab", "b<s>a", "aba"]), min_size=1),
    st.integers(0, 4),
)
def test_special_tokens_end_an_answer_though_they_are_hidden(pieces, stops, may_end_after):
    """Stop strings with a special token are sought in the text with it, others without it."""
    whole, shown_text, ended = "", "", None
    for at, piece in enumerate(pieces):
        for character in piece:
            whole += character
            shown_text += character if piece != "<s>" else ""
            found = [
                stop
                for stop in stops
                if ("<s>" in stop and whole.endswith(stop))
                or ("<s>" not in stop and piece != "<s>" and shown_text.endswith(stop))
            ]
            if found and at >= may_end_after:
                ended = max(found, key=len)
                break
        if ended is not None:
            break
    matcher, given = StopMatcher(stops, special=["<s>"]), ""
    for at, piece in enumerate(pieces):
        given += matcher.feed(piece, hidden=piece == "<s>", may_end=at >= may_end_after)
        if matcher.matched is not None:
            break
    assert matcher.matched == ended
    if ended is None:
        assert given + matcher.finish() == shown_text
    else:
        assert given + ended.replace("<s>", "") == shown_text


def answer_text(tokens: list[int]) -> str:
    return "".join(chr(33 + token) for token in tokens)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_an_answer_ends_at_its_stop_string(include, length):
    tokens = prompt(20, 1)
    text = answer_text(oracle_answer(tokens, 30))
    stop = text[12 : 12 + length]
    end = text.index(stop) + length
    world = make_world("radix")
    world.run(request("r", tokens, 30, stop=("never", stop), include_stop_str_in_output=include))
    answer = world.answers["r", 0]
    assert (answer.finish_reason, answer.matched_stop) == ("stop", stop)
    assert answer.text == (text[:end] if include else text[: end - length])
    assert answer.token_ids == oracle_answer(tokens, end)
    world.assert_idle()


def test_held_text_is_emitted_at_the_end():
    tokens = prompt(20, 1)
    text = answer_text(oracle_answer(tokens, 10))
    world = make_world("radix")
    world.run(request("r", tokens, 10, stop=(text[7:] + "!!",)))
    answer = world.answers["r", 0]
    assert (answer.text, answer.finish_reason, answer.matched_stop) == (text, "length", None)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_ends_the_answer_and_is_not_shown(include):
    tokens = prompt(20, 1)
    expected = oracle_answer(tokens, 30)
    stop = expected[10]
    end = expected.index(stop) + 1
    world = make_world("radix")
    world.run(request("r", tokens, 30, stop_token_ids=(stop,), include_stop_str_in_output=include))
    answer = world.answers["r", 0]
    assert (answer.finish_reason, answer.matched_stop) == ("stop", stop)
    assert answer.token_ids == expected[:end]
    assert answer.text == answer_text(expected[: end if include else end - 1])


def test_min_tokens_keep_stops_and_the_end_token_away():
    tokens = prompt(20, 1)
    world = make_world("radix")
    bias = {95: 100.0}  # the end token, always
    world.run(
        request("ends", tokens, 30, ignore_eos=False, logit_bias=bias),
        request("waits", tokens, 30, ignore_eos=False, logit_bias=bias, min_tokens=6),
        request("ignores", tokens, 8, logit_bias=bias),
    )
    assert world.ids("ends") == [95]
    assert world.answers["ends", 0].text == ""
    waited = world.ids("waits")
    assert (len(waited), waited[-1]) == (7, 95)
    assert 95 not in waited[:-1]
    assert world.ids("ignores") == [95] * 8
    text = answer_text(oracle_answer(tokens, 9))
    world.run(request("later", tokens, 9, stop=(text[1], text[6:8]), min_tokens=4))
    assert world.answers["later", 0].text == text[:6]


@pytest.mark.parametrize("begin", [2, 3, 4])
def test_a_stop_string_across_the_border_of_min_tokens_ends_the_answer(begin):
    tokens = prompt(20, 1)
    text = answer_text(oracle_answer(tokens, 9))
    world = make_world("radix")
    world.run(request("r", tokens, 9, stop=(text[begin:5],), min_tokens=4))
    answer = world.answers["r", 0]
    assert (answer.text, answer.matched_stop) == (text[:begin], text[begin:5])
    assert len(answer.token_ids) == 5


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("shows_special", [False, True])
def test_a_special_token_is_a_stop_string_too(include, shows_special):
    """The model writes nothing but its end token, which reads "<end>" and is ignored."""

    def answer(stop, **more):
        world = make_world("radix")
        more |= {"include_stop_str_in_output": include, "skip_special_tokens": not shows_special}
        bias = {95: 100.0}
        world.run(request("r", prompt(20, 1), 9, stop=(stop,), logit_bias=bias, **more))
        return world.answers["r", 0]

    for stop, tokens, more in (
        ("<end>", 1, {}),
        ("<end><end>", 2, {}),
        ("<end>", 4, {"min_tokens": 3}),
    ):
        ended = answer(stop, **more)
        assert (ended.finish_reason, ended.matched_stop) == ("stop", stop)
        assert len(ended.token_ids) == tokens
    assert ended.text == ("<end>" * 3 if shows_special else "") + ("<end>" if include else "")
