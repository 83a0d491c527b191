"""What everyday English says in several ways: fixed phrases, frames of questions, comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TypeAlias

from kvweave.fuzzy.facts.english import SUBJECTS
from kvweave.fuzzy.facts.wordlists import table, words

Phrases: TypeAlias = "dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]]"
"""By first word: the words of a phrase, longest first, and the words that it becomes."""

_PHRASES = table("""
what time: at what time
why: how come
how-many: how many
how-much: how much
how-long: how long
how-long take: how long does it take
how-long will take: how long will it take
what be the price of: how much is, how much are, what is the cost of, what is the price for
what be the price of: what is the price of
how-much you charge: what do you charge, how much do you charge
you have: have you got
i have: i have got
set-up: set up, setup
log-in: log in, login, log on, sign in
log-out: log out, logout, log off, sign out
register: sign up
turn-on: turn on, switch on
turn-off: turn off, switch off
find-out: find out
turn-on: enable, activate
turn-off: disable, deactivate
fill-in: fill in, fill out
hand-in: hand in, send in, turn in, submit
contact: get in touch with
search for: look for
wifi: wi fi
opening-hours: opening hours, opening times
postcode: post code
voicemail: voice mail
username: user name
timetable: time table
smartphone: smart phone
car-park: car park, parking lot
date of birth: birth date, birthdate
email: e mail
check-in: check in, checkin
check-out: check out, checkout
website: web site
mobile-phone: mobile phone, cell phone, cellphone
to: in order to, so as to
because of: due to, owing to
before: prior to
despite: in spite of
although: even though
instead of: rather than
immediately: straight away, right away
currently: at the moment, at present
by phone: over the phone
about: regarding, with regard to, with respect to
and: as well as
for example: for instance, eg
that is: ie
as-soon-as-possible: as soon as possible
per year: per annum, each year, every year, annually
per month: each month, every month
per week: each week, every week
per day: each day, every day
usa: united states, united states of america
uk: united kingdom
eu: european union
want to: would like to
you: you guys
i need to: is needed to, are needed to, is required to, are required to
i need for: is needed for, are needed for, is required for, are required for
""")
_ABOUT_TO_ASK = table("""
ask: could you tell me, can you tell me, would you tell me, do you know, do you happen to know
ask: can you let me know, could you let me know, can someone tell me, could someone tell me
ask: can anyone tell me, does anyone know, any idea, may i ask, can i ask, could i ask
ask: i would like to know, i want to know, i need to know, i am trying to find out
ask: i was wondering, i am wondering, i wonder, wondering, just wondering
order: tell me, let me know
""")
_MAY_I = table("""
i can: can i, could i, am i able to, is it possible to, is it possible for me to
i may: may i, am i allowed to
""")


def _frames() -> dict[str, str]:
    """How one does something, in its many frames; where and to whom; why not."""
    found = dict.fromkeys(("how to", "how i", "how i can"), "how-to")
    found |= {f"how {verb} i": "how-to" for verb in ("do", "can", "could", "would")}
    nouns = ("way", "steps", "process", "procedure", "method")
    for verb, noun, link in product(("is", "are"), nouns, ("to", "for", "of")):
        found[f"what {verb} the {noun} {link}"] = "how-to"
    found["how do i go about"] = "how-to"
    needs = ("do i need to do", "do i have to do", "should i do", "must i do")
    found |= {f"what {need} to": "how-to" for need in (*needs, "steps do i take")}
    found |= {f"where {verb} i": "where i" for verb in ("do", "can", "could")}
    found |= {f"who {verb} i": "who i" for verb in ("do", "should")}
    return found | {f"why {verb} not": "why not" for verb in ("do", "does", "will", "is", "are")}


def _indexed(phrases: dict[str, str]) -> Phrases:
    index: Phrases = {}
    for phrase, meaning in phrases.items():
        said = tuple(phrase.split())
        index.setdefault(said[0], []).append((said, tuple(meaning.split())))
    for choices in index.values():
        choices.sort(key=lambda choice: -len(choice[0]))
    return index


PHRASES = _indexed(_PHRASES | _frames())
"""Anywhere in a sentence."""
ABOUT_TO_ASK = _indexed(_ABOUT_TO_ASK)
"""At the beginning, if a question follows."""
MAY_I = _indexed(_MAY_I)
"""Where a clause begins."""
MUST = _indexed(
    {f"must {subject}": f"{subject} need to" for subject in SUBJECTS}
    | {"must": "need to", "needs to": "need to"}
)
"""Where nothing is negated: one who need not may, and one who must not may not."""
COMPARISONS = _indexed(
    table("""
<: less than, fewer than, smaller than, lower than, below, under
>: more than, greater than, larger than, higher than, over, above, exceeding, in excess of
<=: at most, up to, no more than, not more than, maximum of, less than or equal to
>=: at least, no less than, no fewer than, not less than, minimum of
>=: greater than or equal to, more than or equal to
~: about, around, approximately, approx, roughly, circa
""")
)
"""In front of a number; anywhere else they are words like others."""
PHRASE_BEGINS = frozenset((*PHRASES, *COMPARISONS, *MUST))
"""First words of all that is looked for anywhere in a sentence."""
COMPARISON_SIGNS = words("< > <= >= ~ = == !=")


def longest(phrases: Phrases, said: Sequence[str], at: int) -> tuple[tuple[str, ...], int] | None:
    """The meaning of the longest phrase that begins at `at`, and the index behind it."""
    for phrase, meaning in phrases.get(said[at], ()):
        end = at + len(phrase)
        if tuple(said[at:end]) == phrase:
            return meaning, end
    return None
