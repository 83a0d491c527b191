"""From text to sentences of facts in one canonical wording; equal readings say the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from kvweave.fuzzy.facts import english, phrases
from kvweave.fuzzy.facts.base import Token
from kvweave.fuzzy.facts.composing import compose
from kvweave.fuzzy.facts.synonyms import canonical, infinitive, inflected, verb
from kvweave.fuzzy.facts.tokens import tokens_of

_STARTS_QUESTION = english.AUXILIARIES | english.QUESTIONS
_FACTS = frozenset(("number", "ordinal", "date", "time", "identifier", "name"))
_MARKS = frozenset('"():/-&%')
"""Marks of ordinary prose; others are those of code, formulas and tables."""


class Sentence(NamedTuple):
    """`turns` are the places where a phrase begins that may as well stand first."""

    facts: tuple[Token, ...]
    turns: tuple[int, ...]
    asks: bool
    clings: bool
    """It refers to what was said before it."""


class Reading(NamedTuple):
    """What a text says. `rigid` text is not understood well enough to be put in another order."""

    sentences: tuple[Sentence, ...]
    names: frozenset[str]
    rigid: bool


@lru_cache(maxsize=1024)
def read(text: str) -> Reading:
    """The reading of a text, remembered: a donor is compared with many recipients."""
    tokens = tokens_of(text)
    names = frozenset(
        token.value
        for before, token in pairwise(tokens)
        if token.kind == "name" and before.kind != "end"
    )
    if not english.is_english(tokens):
        return Reading((Sentence(tuple(tokens), (), False, False),), names, rigid=True)
    sentences: list[Sentence] = []
    for part, asks in _parts(compose(tokens)):
        said = english.without_fillers(_without_courtesies(part, first=not sentences))
        if said:
            sentences += _Interpreter(said, asks).sentences()
    rigid = any(token.kind == "foreign" for token in tokens)
    return Reading(tuple(sentences), names, rigid)


def _parts(tokens: Sequence[Token]) -> Iterator[tuple[list[Token], bool]]:
    """Sentences without their ends, and whether a question mark ended them."""
    part: list[Token] = []
    for token in tokens:
        if token.kind == "end":
            yield part, token.value == "?"
            part = []
        else:
            part.append(token)
    yield part, False


def _without_courtesies(part: Sequence[Token], first: bool) -> list[Token]:
    kept: list[Token] = []
    segments = list(_segments(part))
    for number, segment in enumerate(segments, 1):
        inner = segment[1:] if segment and segment[0].kind == "comma" else segment
        said = [token.value for token in inner if token.is_word]
        all_words, last = len(said) == len(inner), number == len(segments)
        if not (all_words and english.is_courtesy(said, first and not kept, last)):
            kept += segment if kept else inner
    return kept


def _segments(part: Sequence[Token]) -> Iterator[list[Token]]:
    """What stands between commas, each but the first with the comma before it."""
    segment: list[Token] = []
    for token in part:
        if token.kind == "comma":
            yield segment
            segment = []
        segment.append(token)
    yield segment


class _Interpreter:
    """Writes one sentence anew: synonyms and frames replaced, what carries no fact left out."""

    def __init__(self, part: Sequence[Token], asks: bool) -> None:
        self.items = list(part)
        self.said = [token.value if token.is_word else "" for token in part]
        self.asks = asks
        self.denies = not english.NEGATIONS.isdisjoint(self.said)
        self.in_capitals = english.is_title(part)
        self.literal = any(token.kind == "symbol" and token.value not in _MARKS for token in part)
        """Code, quoted text and the like: no word stands for another there."""
        self.facts: list[Token] = []
        self.turns: list[int] = []
        self.joints: list[int] = []
        """Where one clause may end and another begin."""

    def sentences(self) -> Iterator[Sentence]:
        """The sentence, or one for each of its clauses that could stand alone."""
        at = self._behind_introduction()
        begins = True
        while at < len(self.items):
            item = self.items[at]
            if item.kind == "comma":
                self._comma(at)
                at += 1
            elif item.is_word and not self.literal:
                at = (begins and self._clause_begins(at)) or self._word(at)
            else:
                self.literal ^= item.value == '"'
                self.facts.append(item)
                at += 1
            begins = item.kind == "comma"
        is_order = english.is_order(self.items)
        for start, end in self._clauses():
            facts = tuple(self.facts[start:end])
            clings = is_order or any(
                fact.kind == "ordinal" or fact.value in english.REFERS_BACK for fact in facts
            )
            turns = tuple(turn - start for turn in self.turns if start < turn < end)
            turns = tuple(at for at in turns if not (_nests(facts[:at]) or _nests(facts[at:])))
            yield Sentence(facts, turns, self.asks, clings)

    def _behind_introduction(self) -> int:
        """Where the question starts behind "could you tell me" and the like."""
        found = phrases.longest(phrases.ABOUT_TO_ASK, self.said, 0) if self.said else None
        if not found or found[1] == len(self.said):
            return 0
        (kind,), end = found
        if self.said[end] in ("if", "whether") and kind == "ask":
            self.asks = True
            return end + 1
        return end if self.said[end] in english.QUESTIONS else 0

    def _comma(self, at: int) -> None:
        """Left out, unless what it keeps apart would be another fact without it."""
        leads = bool(self.facts) and self._may_lead(self.facts[0].value)
        around = self.items[at - 1 : at] + self.items[at + 1 : at + 2]
        keeps = len(around) == 2 and all(each.kind in _FACTS for each in around)
        if keeps and not (leads and not self.joints):
            self.facts.append(self.items[at])
        self.joints.append(len(self.facts))
        if leads:
            self._turn()

    def _clause_begins(self, at: int) -> int:
        """The index behind "is it possible to", if the clause begins so; else 0."""
        self.asks = self.asks or self.said[at] in _STARTS_QUESTION
        found = phrases.longest(phrases.MAY_I, self.said, at)
        if not found:
            return 0
        self.asks = True
        self._write(*found[0])
        return found[1]

    def _word(self, at: int) -> int:
        """Write what the words at `at` mean; the index behind them."""
        if self.said[at] in phrases.PHRASE_BEGINS and (end := self._phrase(at)):
            return end
        if not self._only_helps(at):
            self._write(self._canonical(at))
        return at + 1

    def _phrase(self, at: int) -> int:
        """Write what several words mean together; the index behind them, or 0 if nothing."""
        compared = phrases.longest(phrases.COMPARISONS, self.said, at)
        if compared and self._is_number(compared[1]):
            (symbol,), end = compared
            self._turn()
            self.facts.append(Token("symbol", symbol))
            return end
        found = phrases.longest(phrases.PHRASES, self.said, at)
        if not found and not self.denies:
            found = phrases.longest(phrases.MUST, self.said, at)
        if not found:
            return 0
        meaning, end = found
        self._write(*meaning)
        self.asks = self.asks or meaning[0] in english.QUESTIONS
        if meaning == ("how-to",) and end < len(self.items) and self.said[end]:
            self._write(infinitive(self.said[end]))
            end += 1
        return end

    def _canonical(self, at: int) -> str:
        word = self.said[at].lower()
        if self._is_name(at):
            return inflected(word)
        is_verb = self.facts and self.facts[-1].value in english.BEFORE_VERBS
        return verb(word) if is_verb else canonical(word)

    def _is_name(self, at: int) -> bool:
        """Whether it may be somebody's name: the Large Bank is not the Big Bank."""
        if self.in_capitals or self.items[at].kind != "name":
            return False
        first = at == 0 or self.items[at - 1].kind == "comma"
        return not first or [each.kind for each in self.items[at + 1 : at + 2]] == ["name"]

    def _is_number(self, at: int) -> bool:
        return at < len(self.items) and self.items[at].kind == "number"

    def _write(self, *said: str) -> None:
        for word in said:
            if self._may_lead(word):
                self._turn()
            elif word == "and":
                self.joints.append(len(self.facts))
            self.facts.append(Token("word", word))
            before = self.facts[-2].value if len(self.facts) > 1 else ""
            if word in english.SUBJECTS and before in english.MODALS:
                # What must I bring: what I must bring. That it is asked, is noted apart.
                self.facts[-2:] = self.facts[:-3:-1]

    def _may_lead(self, word: str) -> bool:
        """Whether the phrase that begins with `word` says the same in front of the sentence.

        "I do not pay because of Bob" may mean that somebody else is the reason.
        """
        return word in english.PREPOSITIONS and not (word == "because" and self.denies)

    def _turn(self) -> None:
        """What comes next may as well stand first."""
        if self.facts and self.turns[-1:] != [len(self.facts)]:
            self.turns.append(len(self.facts))

    def _only_helps(self, at: int) -> bool:
        """Whether it is the "do" of questions and negations."""
        if self.said[at] not in ("do", "does"):
            return False
        behind = self.said[at + 1 : at + 2]
        before = self.said[at - 1] if at else ""
        return behind == ["not"] or (bool(behind) and before not in english.BEFORE_DO)

    def _clauses(self) -> Iterator[tuple[int, int]]:
        """Where the clauses of the sentence begin and end; "and" between two belongs to none."""
        start, length = 0, len(self.facts)
        said = [fact.value for fact in self.facts]
        if not self.asks and english.SUBORDINATES.isdisjoint(said):
            for joint, end in pairwise([*self.joints, length]):
                behind = joint + (said[joint : joint + 1] == ["and"])
                if _is_clause(said[start:joint]) and _is_clause(said[behind:end]):
                    yield start, joint
                    start = behind
        yield start, length


def _nests(facts: Sequence[Token]) -> bool:
    """Whether more than one verb is there for a phrase to belong to: they decided to leave."""
    return any(
        (fact.value in english.NESTING and before.value != "how-to")
        or (before.value == "to" and fact.kind == "word" and fact.value not in english.BEHIND_TO)
        for before, fact in pairwise(facts if not facts or facts[0].value != "to" else facts[1:])
    )


def _is_clause(said: Sequence[str]) -> bool:
    """Whether it could stand alone: it has a verb, and somebody whose verb it is."""
    return (
        len(said) > 2
        and said[0] not in english.PREPOSITIONS
        and said[0] not in english.AUXILIARIES
        and not english.AUXILIARIES.isdisjoint(said)
    )
