"""What holds for any text, whatever stands in it."""

from __future__ import annotations

import re

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvweave.fuzzy.facts import differing

WORDS = """the a Alice Bob owes paid 5 1,000 3.10 kg euros % -20 °C not never is was has can may do
does I you he on Monday in March 2024 at 3pm 15:00 if and or but , . ? ; before after more than
under all some only order A-17 report.txt to from what how who please so thanks \" ( ) < >= US us
May one two hundred first half price of""".split()  # noqa: SIM905
SENTENCES = st.lists(st.sampled_from(WORDS), min_size=1, max_size=14).map(" ".join)
TEXTS = st.text(max_size=60) | SENTENCES
NAMES = st.sampled_from(("Alice", "Bob", "Carol", "Rome", "Fiat", "Ottawa"))
NUMBERS = (
    st.integers(0, 10**12).map(str)
    | st.integers(1000, 10**9).map("{:,}".format)
    | st.decimals(0, 10**6, places=2).map(str)
    | st.from_regex(r"[A-Z]{1,3}-?[0-9]{2,6}", fullmatch=True)
    | st.from_regex(r"-[1-9][0-9]? °C", fullmatch=True)
    | st.uuids().map(str)
    | st.dates().map(str)
)
FRAMES = st.sampled_from(
    (
        "{name} owes the bank {number} and has not paid.",
        "What does {name} pay for {number}?",
        "On Monday, {name} sent {number} to the office. It was not enough.",
        "If the fee is over {number}, {name} may cancel. Nobody else can not.",
    )
)


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_a_text_says_the_same_as_itself(text: str) -> None:
    assert differing(text, text + " ") is None


@given(TEXTS, TEXTS)
@settings(max_examples=300, deadline=None)
def test_donor_and_recipient_may_change_places(one: str, other: str) -> None:
    assert (differing(one, other) is None) == (differing(other, one) is None)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_other_digit_of_any_number_is_refused(data: st.DataObject) -> None:
    text = data.draw(FRAMES).format(name=data.draw(NAMES), number=data.draw(NUMBERS))
    at = data.draw(st.sampled_from([match.start() for match in re.finditer(r"\d", text)]))
    other = data.draw(st.sampled_from("0123456789").filter(lambda digit: digit != text[at]))
    assert differing(text, text[:at] + other + text[at + 1 :])


@given(FRAMES, NAMES, NUMBERS)
@settings(max_examples=100, deadline=None)
def test_a_negation_less_is_refused(frame: str, name: str, number: str) -> None:
    text = frame.format(name=name, number=number)
    assume(" not " in text)
    assert differing(text, text.replace(" not ", " ", 1))


@given(FRAMES, NAMES, NAMES, NUMBERS)
@settings(max_examples=100, deadline=None)
def test_another_name_is_refused(frame: str, name: str, other: str, number: str) -> None:
    assume(name != other)
    assert differing(
        frame.format(name=name, number=number), frame.format(name=other, number=number)
    )


@given(st.lists(NAMES, min_size=2, max_size=4, unique=True), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_sentences_that_stand_alone_may_change_places(names: list[str], chance: object) -> None:
    sentences = [f"{name} has {len(name)} cars." for name in names]
    assert differing(" ".join(sentences), " ".join(reversed(sentences))) is None


IDLE = (*",.?;", "do", "does", "please", "so", "thanks", "and")


@given(SENTENCES, st.data())
@settings(max_examples=300, deadline=None)
def test_a_word_less_is_refused_unless_it_is_idle(text: str, data: st.DataObject) -> None:
    said = [word for word in text.split() if word not in IDLE]
    assume(len(said) > 1)
    at = data.draw(st.integers(0, len(said) - 1))
    text = " ".join(said)
    assert differing(text, " ".join(said[:at] + said[at + 1 :]))
