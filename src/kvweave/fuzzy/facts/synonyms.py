"""Words that stand for each other wherever either may stand, and the forms of regular verbs.

Whatever is not listed is itself and nothing else: a missing entry costs a refusal, a wrong one
would cost a wrong answer.
"""

from __future__ import annotations

from functools import lru_cache

from kvweave.fuzzy.facts.spelling import american
from kvweave.fuzzy.facts.wordlists import lines, words

_VERBS = lines("""
buy purchase
begin start commence
help assist
choose select
repair mend fix
obtain acquire
delete erase
end terminate
stop cease
try attempt
use utilize
inform notify
speak talk
find locate
live reside
happen occur
leave depart
modify alter
allow permit
forbid prohibit
silence mute
need require
reply respond
reduce decrease
finish complete
get receive
""")
"""In the present; the first of a line stands for all, form by form."""
_ONLY_VERBS = lines("""
show display
change switch
close shut
book reserve
""")
"""Verbs whose nouns or adjectives mean different things: a book is no reserve."""
_OTHERS = lines("""
big large
cheap inexpensive
faulty defective
ill sick
whole entire
extra additional
overseas abroad
needed required
allowed permitted
maybe perhaps
usually normally
often frequently
rarely seldom
almost nearly
although though
price cost
prices costs
photo picture
photos pictures
film movie
films movies
shop store
shops stores
holiday vacation
holidays vacations
lift elevator
rubbish trash garbage
sofa couch
taxi cab
quick fast rapid
quicker faster
quickest fastest
quickly rapidly
annual yearly
tv television
phone telephone
photo photograph
photos photographs
exam examination
lab laboratory
bike bicycle
fridge refrigerator
advert advertisement
adverts advertisements
flu influenza
journey trip
doctor physician
lawyer attorney
child kid
children kids
dad father
mum mom mother
wealthy rich
incorrect wrong
difficult hard
each every
information info
repository repo
repositories repos
configuration config
maximum max
department dept
government govt
account acct
appointment appt
message msg
password pw pwd
tomorrow tmrw
your ur
as-soon-as-possible asap
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
""")
_ALWAYS = lines("""
i me myself
my mine
we us
our ours
he him
they them
who whom
be is are am been being
was were
monday mon
tuesday tue tues
thursday thu thur thurs
friday fri
""")
"""Forms of the same word, which even names may have."""
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


_SAME_VERB = {other: first for first, *others in _ONLY_VERBS for other in others}


def verb(word: str) -> str:
    """The one word for a verb's synonyms, where only a verb can stand."""
    found = canonical(word)
    return _SAME_VERB.get(found, found)


@lru_cache(maxsize=4096)
def infinitive(word: str) -> str:
    """The verb that a word is a form of, behind "the process for": submitting is submit."""
    stem = word.removesuffix("ing")
    if stem != word and len(stem) > 2:
        if american(stem + "e") in _SILENT_E:
            word = stem + "e"
        elif stem[-1] == stem[-2] and stem[:-1] in _DOUBLED:
            word = stem[:-1]
        else:
            word = stem
    return verb(word)


def _forms(verb: str) -> list[str]:
    """A regular verb in the present: begin, begins, beginning."""
    third = verb + ("es" if verb.endswith(("s", "sh", "ch", "x")) else "s")
    if verb.endswith("y") and verb[-2] not in "aeiou":
        third = verb[:-1] + "ies"
    doubled = verb[-1] if verb in _DOUBLED else ""
    return [verb, third, verb.removesuffix("e") + doubled + "ing"]


def _same() -> dict[str, str]:
    found = dict(_FORMS)
    for first, *others in _VERBS:
        for other in others:
            found |= dict(zip(_forms(other), _forms(first), strict=True))
    for first, *others in _OTHERS:
        found |= dict.fromkeys(others, first)
    return found


_FORMS = {other: first for first, *others in _ALWAYS for other in others}
_SAME = _same()


def inflected(word: str) -> str:
    """The one form of a word that has no synonyms, because it is quoted or a name."""
    return _FORMS.get(word, word)


@lru_cache(maxsize=32_768)
def canonical(word: str) -> str:
    """The one word that stands for all its spellings, forms and synonyms."""
    word = _SAME.get(word) or american(word)
    return _SAME.get(word, word)
