"""What counts as the same, and what does not, pair by pair."""

from __future__ import annotations

import pytest

from kvweave.fuzzy.facts import differing

SAME = [
    ("The fee is 1,000 dollars.", "The fee is $1000."),
    ("one thousand users", "1e3 users"),
    ("It starts on March 1, 2024.", "It starts on 2024-03-01."),
    ("Alice has paid. Bob has left.", "Bob has left. Alice has paid."),
    ("If it rains, we stay home.", "We stay home if it rains."),
]
DIFFERENT = [
    ("Alice owes Bob 5.", "Bob owes Alice 5."),
    ("It is -20 C.", "It is 20 C."),
    ("It weighs 5 kg.", "It weighs 5 lb."),
    ("The deposit is refundable.", "The deposit is not refundable."),
]


@pytest.mark.parametrize(("donor", "recipient"), SAME)
def test_the_same_facts_are_accepted(donor: str, recipient: str) -> None:
    assert differing(donor, recipient) is None
    assert differing(recipient, donor) is None


@pytest.mark.parametrize(("donor", "recipient"), DIFFERENT)
def test_another_fact_is_refused(donor: str, recipient: str) -> None:
    assert differing(donor, recipient) is not None
    assert differing(recipient, donor) is not None
