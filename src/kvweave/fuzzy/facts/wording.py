"""What everyday English says in several ways: synonyms, fixed phrases, frames of questions.

Only words that can stand for each other wherever either may stand. Whatever is not listed is itself
and nothing else: a missing entry costs a refusal, a wrong one would cost a wrong answer.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import TypeAlias

from kvweave.fuzzy.facts.spelling import american
from kvweave.fuzzy.facts.wordlists import lines, table, words

Phrases: TypeAlias = "dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]]"
"""By first word: the words of a phrase, longest first, and the words that it becomes."""

_VERBS = lines("""
buy purchase
begin start commence
help assist
choose select
repair mend
obtain acquire
show display
change switch
modify alter
allow permit
forbid prohibit
silence mute
need require
reply respond
close shut
reduce decrease
finish complete
get receive
""")
"""In the present; the first of a line stands for all, form by form."""
_OTHERS = lines("""
big large
quick fast rapid
quicker faster
quickest fastest
quickly rapidly
yearly annual
tv television
phone telephone
photo photograph
exam examination
lab laboratory
bike bicycle
fridge refrigerator
advert advertisement
flu influenza
journey trip
physician doctor
attorney lawyer
kid child
kids children
dad father
mum mom mother
wealthy rich
incorrect wrong
difficult hard
each every
info information
admin administrator
repo repository
config configuration
max maximum
dept department
govt government
document doc
documents docs
asap as-soon-as-possible
monday mon
tuesday tue tues
thursday thu thur thurs
friday fri
who whom
what which
while whilst
among amongst
toward towards
until till
program programme
grey gray
catalog catalogue
dialog dialogue
jewelry jewellery
aluminum aluminium
practice practise
license licence
defense defence
offense offence
installment instalment
installments instalments
enroll enrol
fulfill fulfil
skillful skilful
judgment judgement
aging ageing
i me myself
my mine
we us
our ours
he him
they them
be is are am been being
was were
""")
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
wifi: wi fi
email: e mail
check-in: check in, checkin
check-out: check out, checkout
website: web site
mobile-phone: mobile phone, cell phone
to: in order to, so as to
because of: due to, owing to
before: prior to
despite: in spite of
about: regarding, with regard to, with respect to
and: as well as
for example: for instance, eg
that is: ie
as-soon-as-possible: as soon as possible
per year: per annum, each year, every year
per month: each month, every month
per week: each week, every week
per day: each day, every day
usa: united states, united states of america
uk: united kingdom
eu: european union
want to: would like to
""")
_ABOUT_TO_ASK = table("""
ask: could you tell me, can you tell me, would you tell me, tell me, let me know, do you know
ask: can you let me know, could you let me know, i would like to know, i want to know
ask: i was wondering, i wonder, may i ask, can i ask, could i ask
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
    needs = ("do i need to do", "do i have to do", "should i do")
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
MUST = _indexed(table("must: need to, needs to"))
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
COMPARISON_SIGNS = words("< > <= >= ~ = == !=")

_DOUBLED = words("begin permit forget stop plan shut get set put cut run submit transfer")
_SILENT_E = words(
    """activate advertise agree apologize arrange arrive authenticate cancel change charge choose
    close combine compare complete compose configure continue create customize deactivate decide
    decline decrease define delete describe disable divide donate downgrade drive duplicate enable
    escape exchange exclude execute file freeze generate give handle have hide hire ignore improve
    include increase initialize insure integrate invite issue leave like live locate lose make
    manage measure merge migrate mute note notice observe optimize organize pause place prepare
    produce provide purchase raise reactivate receive recognize reduce refuse release remove rename
    renegotiate replace require rescue reserve resolve restore resume retire reuse revoke save
    schedule secure serve share solve stage store subscribe take terminate translate unfreeze
    unsubscribe update upgrade use validate value write"""
)


@lru_cache(maxsize=4096)
def verb(word: str) -> str:
    """The verb that a word is a form of, where only a verb can stand: submitting is submit."""
    stem = word.removesuffix("ing")
    if stem != word and len(stem) > 2:
        if american(stem + "e") in _SILENT_E:
            word = stem + "e"
        elif stem[-1] == stem[-2] and stem[:-1] in _DOUBLED:
            word = stem[:-1]
        else:
            word = stem
    return canonical(word)


def _forms(verb: str) -> list[str]:
    """A regular verb in the present: begin, begins, beginning."""
    third = verb + ("es" if verb.endswith(("s", "sh", "ch", "x")) else "s")
    if verb.endswith("y") and verb[-2] not in "aeiou":
        third = verb[:-1] + "ies"
    doubled = verb[-1] if verb in _DOUBLED else ""
    return [verb, third, verb.removesuffix("e") + doubled + "ing"]


def _same() -> dict[str, str]:
    found: dict[str, str] = {}
    for first, *others in _VERBS:
        for other in others:
            found |= dict(zip(_forms(other), _forms(first), strict=True))
    for first, *others in _OTHERS:
        found |= dict.fromkeys(others, first)
    return found


_SAME = _same()


@lru_cache(maxsize=32_768)
def canonical(word: str) -> str:
    """The one word that stands for all its spellings and synonyms."""
    word = _SAME.get(word) or american(word)
    return _SAME.get(word, word)
