"""What holds for any text, whatever stands in it."""

from __future__ import annotations

import re

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvweave.paraphrase.facts import differing, normal

WORDS = """the a Alice Bob owes paid 5 1,000 1500 3.10 kg % -20 not never is was has have are can
can't do don't doesn't I I'm you're we've he they on Monday in March 2024 3pm if and or but , . ? ;
before than under all some only A-17 to from what What how How where please Please Could you send me
tell Hello Hi Hey guests users two twenty-one because since want pay bill the my \u2019 don\u2019t
\" ( ) it. it? bill. bill? me, please? please. \u00a0 \n""".split(" ")  # noqa: SIM905
SENTENCES = st.lists(st.sampled_from(WORDS), min_size=1, max_size=14).map(" ".join)
TEXTS = st.text(max_size=60) | SENTENCES
FRAMES = st.sampled_from(
    (
        "Could you please send me the bill of {number} {noun} in {month}?",
        "Hello, how do I pay for {number} {noun} in {month}, please?",
        "There are {number} {noun} here, and they don't have the {month} of it.",
        "I'm late because we've never had {number} {noun}, and it does not work in {month}.",
        "Please tell me the {noun} that are not {number} of it in {month}.",
        "What are the {noun} of {number} with {month}, please?",
    )
)
NOUNS = st.sampled_from(("guests", "users", "bills", "rooms"))
MONTHS = st.sampled_from(("May", "June", "Rome", "the car"))
NUMBERS = (
    st.integers(0, 10**6).map(str)
    | st.integers(1000, 10**9).map("{:,}".format)
    | st.decimals(0, 10**6, places=2).map(str)
    | st.sampled_from(("two", "six", "ten", "nine", "five", "twenty-one", "sixty", "A-17", "2E5"))
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@st.composite
def plain(draw: st.DrawFn) -> str:
    """English in which every rule has something to do."""
    frames = draw(st.lists(FRAMES, min_size=1, max_size=2))
    return " ".join(
        frame.format(number=draw(NUMBERS), noun=draw(NOUNS), month=draw(MONTHS)) for frame in frames
    )


def differ(one: str, other: str) -> bool:
    return differing(one, other) is not None and differing(other, one) is not None


@given(TEXTS | plain())
@settings(max_examples=500, deadline=None)
def test_a_normal_form_is_its_own(text: str) -> None:
    form = normal(text)
    assert normal(form) == form
    assert differing(text, form) is None


@given(TEXTS | plain(), TEXTS | plain())
@settings(max_examples=300, deadline=None)
def test_two_texts_are_the_same_if_their_normal_forms_are(one: str, other: str) -> None:
    assert (differing(one, other) is None) == (normal(one) == normal(other))


@given(plain(), st.data())
@settings(max_examples=500, deadline=None)
def test_any_other_digit_is_refused(text: str, data: st.DataObject) -> None:
    places = [match.start() for match in re.finditer(r"\d", text)]
    assume(places)
    at = data.draw(st.sampled_from(places))
    other = data.draw(st.sampled_from("0123456789").filter(lambda digit: digit != text[at]))
    assert differ(text, text[:at] + other + text[at + 1 :])


@given(plain() | SENTENCES, st.data())
@settings(max_examples=1000, deadline=None)
def test_any_other_letter_of_a_word_is_refused(text: str, data: st.DataObject) -> None:
    places = [match.start() for match in re.finditer(r"[A-Za-z]", text)]
    assume(places)
    at = data.draw(st.sampled_from(places))
    other = data.draw(st.sampled_from(LETTERS).filter(lambda letter: letter != text[at].lower()))
    assert differ(text, text[:at] + other + text[at + 1 :])


@given(plain(), st.data())
@settings(max_examples=500, deadline=None)
def test_a_negation_more_or_less_is_refused(text: str, data: st.DataObject) -> None:
    negations = [
        text.replace(*each, 1)
        for each in (("n't", ""), (" not ", " "), (" never ", " "), ("they don't", "they"))
        if each[0] in text
    ]
    words = text.split()
    at = data.draw(st.integers(0, len(words)))
    negations.append(" ".join([*words[:at], "not", *words[at:]]))
    assert all(differ(text, other) for other in negations)


@given(plain() | SENTENCES, st.data())
@settings(max_examples=1000, deadline=None)
def test_another_order_of_words_is_refused(text: str, data: st.DataObject) -> None:
    words = text.split()
    assume(len(words) > 1)
    one, other = sorted(data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2)))
    assume(words[one] != words[other])
    swapped = [*words]
    swapped[one], swapped[other] = words[other], words[one]
    assert differ(" ".join(words), " ".join(swapped))


@given(plain(), st.data())
@settings(max_examples=500, deadline=None)
def test_a_word_less_is_refused_unless_it_is_a_courtesy(text: str, data: st.DataObject) -> None:
    words = text.split()
    at = data.draw(st.integers(0, len(words) - 1))
    assume(words[at].strip(",?.") not in ("Hello", "Please", "please"))
    assert differ(text, " ".join([*words[:at], *words[at + 1 :]]))
