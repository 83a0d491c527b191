"""Words as they are written: contractions, capitals, British and American spelling."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

from kvweave.fuzzy.facts.units import UNITS
from kvweave.fuzzy.facts.wordlists import table, words


class Written(NamedTuple):
    """A word in small letters, unless capitals make it another one."""

    word: str
    is_name: bool = False
    is_opaque: bool = False


_CONTRACTED = table("""
can not: can't, cannot, cant
will not: won't, wont
shall not: shan't
let us: let's
do not: dont
does not: doesnt
did not: didnt
is not: isnt
are not: arent
was not: wasnt
were not: werent
would not: wouldnt
should not: shouldnt
could not: couldnt
has not: hasnt
have not: havent
had not: hadnt
what is: whats
where is: wheres
who is: whos
how is: hows
when is: whens
you are: youre
they are: theyre
you have: youve
we have: weve
that is: thats
there is: theres
i am: im
i have: ive
going to: gonna
want to: wanna
""")
_ENDINGS = {"'re": "are", "'m": "am", "'ll": "will", "'ve": "have", "'d": "would", "n't": "not"}
_TAKES_IS = words(
    """what where who when why how which it he she that this there here everything something
    everyone someone"""
)
"""Behind these, 's is short for is; behind others it tells whose something is."""
_CLASHES = {"US": "usa", "IT": "information technology", "WHO": "world health organization"}
"""Capitals that are another word than the small letters."""


def written(word: str) -> list[Written]:
    """The words that a run of letters and apostrophes stands for."""
    if len(word) == 1:
        # Plan A, vitamin C, part P: only I is an everyday word in capitals.
        return [Written("i" if word == "I" else word)]
    if word in _CLASHES:
        return [Written(_CLASHES[word])]
    if word == "May" or (word in UNITS and not word.islower()):
        # The month, or the first word of a question; a unit, if it follows a number.
        return [Written(word)]
    if _is_opaque(word):
        return [Written(word, is_opaque=True)]
    small = word.lower().replace("\u2019", "'")
    if small in _CONTRACTED:
        return [Written(part) for part in _CONTRACTED[small].split()]
    if small.endswith("'s"):
        stem = small[:-2]
        return [Written(stem), Written("is" if stem in _TAKES_IS else "'s")]
    for ending, meaning in _ENDINGS.items():
        if small.endswith(ending) and len(small) > len(ending):
            return [Written(small[: -len(ending)]), Written(meaning)]
    return [Written(small, is_name=word[0].isupper())]


def _is_opaque(word: str) -> bool:
    """aBcDeF and myName are, while GitHub and NASA may be written in small letters as well."""
    if word.islower() or word.isupper() or word.istitle():
        return False
    turns = sum(one.islower() and other.isupper() for one, other in pairwise(word))
    return turns > 1 or (turns == 1 and word[0].islower())


_AMERICAN = (
    (re.compile(r"(?<=.{3})our(?=$|s$|ed$|ing$|it|ab|less|ful)"), "or"),
    (re.compile(r"(?<=.{3})is(?=(?:e|es|ed|ing|ation|ations)$)"), "iz"),
    (re.compile(r"(?<=.{3})ys(?=(?:e|es|ed|ing)$)"), "yz"),
    (re.compile(r"(?<=.{2}[tb])re(?=s?$)"), "er"),
    (re.compile(r"([aeiou][a-z]*[aeiou]l)l(?=(?:ed|ing|er|ers)$)"), r"\1"),
)


def american(word: str) -> str:
    """One spelling for colour, centre, organise, analyse and travelled; not always a real one."""
    if len(word) > 5 and word.isascii():
        for pattern, spelling in _AMERICAN:
            word = pattern.sub(spelling, word)
    return word
