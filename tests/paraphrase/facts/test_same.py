"""What counts as the same: every change of the normal form, one by one, and what it looks like."""

from __future__ import annotations

import pytest

from kvweave.paraphrase.facts import differing, literal, normal
from support.traps import pairs

SAME = {
    "white space": """
        We have milk.  We need eggs. | We have milk. We need eggs.
        We have\u00a0milk. | We have milk.
    """,
    "characters": """
        We have a cafe\u0301 here. | We have a caf\u00e9 here.
        We don\u2019t have it. | We don't have it.
    """,
    "contractions": """
        He doesn't pay. | He does not pay.
        You can't leave it there. | You cannot leave it there.
        They won't work if it rains. | They will not work if it rains.
        Who doesn't want it? | Who does not want it?
        I'm late and you don't know why. | I am late and you do not know why.
        We've lost it because we're old. | We have lost it because we are old.
    """,
    "numbers": """
        There are 1,500 visitors. | There are 1500 visitors.
        We have 1,234,567 users. | We have 1234567 users.
        There were twenty-one guests, and two children. | There were 21 guests, and two children.
        It has five rooms, and we had ten guests. | It has five rooms, and we had 10 guests.
    """,
    "courtesies": """
        Please send me the bill. | Send me the bill.
        Please, send me the bill. | Send me the bill.
        Could you please send me the bill of May? | Send me the bill of May.
        Send me the bill, please. | Send me the bill.
        Hello, how do I pay? | How do I pay?
        Please, where can I pay? | Where can I pay?
        When can we pay, please? | When can we pay?
        What are the fees in May, please? | What are the fees in May?
        We don't know. Please send me the bill. | We don't know. Send me the bill.
    """,
    "capitals": """
        how do I pay? | How do I pay?
    """,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "donor", "recipient"), pairs(SAME))
def test_what_cannot_change_a_fact_is_the_same(kind: str, donor: str, recipient: str) -> None:
    assert donor != recipient
    assert differing(donor, recipient) is None
    assert differing(recipient, donor) is None


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("Could you please tell me the price?", "Tell me the price."),
        ("We don\u2019t have 1,500 users.\n", "We do not have 1500 users.\n"),
        ("x  = 1,500", "x  = 1,500"),
        ("", ""),
        (" ", " "),
    ],
)
def test_the_normal_form(text: str, form: str) -> None:
    assert normal(text) == form


def test_a_text_that_may_begin_within_a_sentence_keeps_its_courtesies() -> None:
    long = "We know that the car is not here. " * 4
    assert differing(long + "Please send me the bill.", long + "Send me the bill.")
    assert differing(long + "We don't know.", long + "We do not know.") is None


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", False),
        ("It is open. He doesn't pay the students' fee. ", False),
        ("<|im_start|>user\n", False),
        ("A closed ```block``` and `code`, and a \"quotation\". ", False),
        ("He said:\n\n'Come.' ", False),
        ("A fence:\n```\nfirst.\n\n", True),
        ("A fence:\n~~~text\nfirst. ", True),
        ("He said \"We are open. ", True),
        ("He said \u201cWe are open. ", True),
        ("He said 'We are open. ", True),
        ("Say `We are open. ", True),
        ("Read on.\n> We are open. ", True),
        ("Read on.\n# We are open. ", True),
        ("Read on.\n    We are open. ", True),
        ("Read on.\ntext = We are open. ", True),
        ("He said \"We are open.\n\n", False),
        ("<pre>We are open.</pre>\n", False),
        ("<pre>\nWe are open.\n\n", True),
        ('"""Opens.\n\n', True),
        ("cat <<EOF\nWe are open.\n", True),
        ("x = 5\nWe are open. ", True),
    ],
)  # fmt: skip
def test_code_and_quotations_are_told_by_what_stands_before(before: str, expected: bool) -> None:
    assert literal(before) is expected
