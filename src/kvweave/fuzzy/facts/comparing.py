"""Whether two readings say the same, and if not, what the weightiest difference is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from kvweave.fuzzy.facts import english
from kvweave.fuzzy.facts.base import Token
from kvweave.fuzzy.facts.phrases import COMPARISON_SIGNS
from kvweave.fuzzy.facts.reading import Reading, Sentence

_Block: TypeAlias = "tuple[Sentence, ...]"
"""Sentences that only make sense behind each other."""

_WEIGHT = (
    "numbers", "dates", "times", "identifiers", "comparisons", "negations", "quantities",
    "questions", "names", "words", "marks", "words of a script that is not understood",
)  # fmt: skip
"""What texts differ in, as it is called in a sentence; what comes first is said."""
_CALLED = {"number": "numbers", "numeral": "numbers", "ordinal": "numbers", "date": "dates",
           "time": "times", "identifier": "identifiers", "foreign": _WEIGHT[-1]}  # fmt: skip


def difference(donor: Reading, recipient: Reading) -> str | None:
    """None if both say the same; else one sentence that says in what they differ."""
    if len(donor.sentences) == len(recipient.sentences):
        rigid = donor.rigid or recipient.rigid
        pairs = zip(donor.sentences, recipient.sentences, strict=True)
        if all(_same(one, other, rigid) for one, other in pairs):
            return None
        if not rigid and _rearranged(donor.sentences, recipient.sentences):
            return None
    ours, theirs = _counts(donor), _counts(recipient)
    only_donor, only_recipient = ours - theirs, theirs - ours
    if not only_donor and not only_recipient:
        return "the same words stand in another order or form, so that they may say something else"
    names = donor.names | recipient.names
    kind = min((_kind(token, names) for token in only_donor + only_recipient), key=_WEIGHT.index)
    return (
        f"{kind} differ: {_listed(only_donor, kind, names)} in the donor,"
        f" {_listed(only_recipient, kind, names)} in the recipient"
    )


def _same(one: Sentence, other: Sentence, rigid: bool) -> bool:
    if one.asks != other.asks or len(one.facts) != len(other.facts):
        return False
    if one.facts == other.facts:
        return True
    return not rigid and (_turned(one, other.facts) or _turned(other, one.facts))


def _turned(sentence: Sentence, facts: tuple[Token, ...]) -> bool:
    """Whether `facts` are the sentence with a later phrase put first: on Monday we close."""
    return any(
        sentence.facts[turn] == facts[0] and sentence.facts[turn:] + sentence.facts[:turn] == facts
        for turn in sentence.turns
        if turn < len(sentence.facts)
    )


def _rearranged(donor: Sequence[Sentence], recipient: Sequence[Sentence]) -> bool:
    """Whether whole sentences, each with what leans on it, only changed places."""
    left = _blocks(recipient)
    for block in _blocks(donor):
        for candidate in left:
            if len(block) == len(candidate) and all(
                _same(one, other, False) for one, other in zip(block, candidate, strict=True)
            ):
                left.remove(candidate)
                break
        else:
            return False
    return not left


def _blocks(sentences: Sequence[Sentence]) -> list[_Block]:
    blocks: list[_Block] = []
    for sentence in sentences:
        if blocks and sentence.clings:
            blocks[-1] += (sentence,)
        else:
            blocks.append((sentence,))
    return blocks


def _counts(reading: Reading) -> Counter[Token]:
    return Counter(fact for sentence in reading.sentences for fact in sentence.facts)


def _kind(token: Token, names: frozenset[str]) -> str:
    """What a token is called in a sentence about it."""
    if token.kind in _CALLED:
        return _CALLED[token.kind]
    if token.value in COMPARISON_SIGNS:
        return "comparisons"
    if not token.is_word:
        return "marks"
    if token.value in english.NEGATIONS:
        return "negations"
    if token.value in english.QUANTIFIERS:
        return "quantities"
    if token.value in english.QUESTIONS:
        return "questions"
    return "names" if token.value in names else "words"


def _listed(tokens: Counter[Token], kind: str, names: frozenset[str]) -> str:
    values = [repr(token.value) for token in tokens if _kind(token, names) == kind]
    shown = ", ".join(values[:3]) + (", ..." if len(values) > 3 else "")
    return shown or "none"
