"""The small words of English: what they do in a sentence, and which of them carry no fact."""

from __future__ import annotations

from collections.abc import Sequence

from kvweave.fuzzy.facts.base import Token
from kvweave.fuzzy.facts.wordlists import words

NEGATIONS = words(
    "not no never none nothing nobody nowhere neither nor without hardly barely scarcely non"
)
QUANTIFIERS = words(
    """all some every any most many much few several both half only more less least fewer always
    often sometimes rarely usually enough"""
)
QUESTIONS = words("what who whose when where why how how-to how-many how-much how-long")
AUXILIARIES = words(
    "be was have has had will would can could may might must should shall did do does"
)
MODALS = words("can could may might must should shall will would")
SUBJECTS = words("i you we they he she it")
PREPOSITIONS = words(
    """about above across after against along among around as at because before behind below
    beneath beside besides between beyond by despite down during except for from if in inside into
    like near of off on onto out outside over past per since than through throughout to toward
    under unless until up upon via when while with within without although though whereas"""
)
REFERS_BACK = words(
    """he she they it his her its their theirs this that these those former latter then next finally
    afterwards later thereafter same such other another others else also too neither respectively
    instead otherwise therefore thus hence so however but and or nor yet above below following
    previous"""
)
"""Words that lean on the sentence before, which may then not be moved away from it."""
NESTING = words(
    """that who whose whether say says said think thinks thought believe believes believed claim
    claims claimed know knows knew hope hopes hoped expect expects expected tell tells told report
    reports reported state states stated deny denies denied doubt doubts doubted"""
)
"""Where one of them stands, a phrase at the end may belong to what is said, or to who says it."""
SUBORDINATES = NESTING | words("where if unless or either")
"""Where one of them stands, what follows may be no statement of its own."""
BEHIND_TO = QUANTIFIERS | words(
    "a an the my your our his her its their this these me you us him it them"
)
"""Behind "to", one of them begins a place or a person; any other word may be a verb."""
BEFORE_VERBS = SUBJECTS | MODALS | words("to how-to not")
"""Behind these, a word is a verb if it can be one."""
BEFORE_DO = SUBJECTS | MODALS | words("to please not")
"""Behind these, "do" is something that is done; elsewhere it only helps to ask or to negate."""

_BEGIN_NO_ORDER = (
    QUANTIFIERS | QUESTIONS | AUXILIARIES | PREPOSITIONS | SUBJECTS | REFERS_BACK
    | words("a an the my your his her its our their there here")
)  # fmt: skip
_FOLLOW_ORDERS = (
    QUANTIFIERS | PREPOSITIONS
    | words("a an the my your his her its our their it them him me us this that these those")
)  # fmt: skip


def is_title(sentence: Sequence[Token]) -> bool:
    """Whether It Is Written Like This, so that capitals do not tell what is a name."""
    small = AUXILIARIES | QUESTIONS | SUBJECTS | words("is are does")
    return any(token.kind == "name" and token.value in small for token in sentence[1:])


def is_order(sentence: Sequence[Token]) -> bool:
    """Whether a sentence seems to tell what to do: then its place among others matters."""
    if len(sentence) < 2 or not sentence[0].is_word or sentence[0].value in _BEGIN_NO_ORDER:
        return False
    return sentence[1].value in _FOLLOW_ORDERS or sentence[1].kind == "number"


_FILLERS = words("um umm uh er erm hmm please pls plz kindly basically")
_OPENERS = words("hi hello hey hiya howdy so ok okay oh")
_COURTESIES = words(
    """hi hello hey hiya howdy greetings dear thanks thank thx ta cheers regards appreciated please
    pls plz"""
)
_AROUND_COURTESIES = words(
    """there team all everyone folks guys sir madam you so very much many lots in advance again
    good morning afternoon evening day for your the a any help time kind best is would be"""
)
_WHOLE_COURTESIES = frozenset(
    ("morning", "afternoon", "evening", "good morning", "good afternoon", "good evening",
     "quick question", "quick one", "excuse me", "sorry to bother you", "hope you are well",
     "i hope you are well", "hope all is well")
)  # fmt: skip
_HESITATIONS = frozenset(("well", "right", "sorry", "so", "ok", "okay", "anyway", "oh"))
_IN_COURTESIES = _COURTESIES | _AROUND_COURTESIES | _FILLERS | _OPENERS


def is_courtesy(said: Sequence[str], first: bool, last: bool) -> bool:
    """Whether all that stands between two commas is a greeting, thanks or hesitation.

    `first`: nothing but courtesies was said before, so that "morning" is a greeting, too; `last`:
    nothing follows in the sentence, so that "right" is an answer.
    """
    together = " ".join(said)
    if together in _WHOLE_COURTESIES or (together in _HESITATIONS and not last):
        return first
    return (not said) or (_IN_COURTESIES.issuperset(said) and not _COURTESIES.isdisjoint(said))


def without_fillers(sentence: Sequence[Token]) -> list[Token]:
    """A sentence without what people say before it begins, and while they think."""
    start = 0
    while start < len(sentence) and sentence[start].value in _OPENERS | _FILLERS:
        start += 1
    # In capitals, ER is a place in a hospital.
    kept = [
        token
        for token in sentence[start:]
        if not (token.kind == "word" and token.value in _FILLERS)
    ]
    return kept or list(sentence)  # "OK." answers something


_ENGLISH = NEGATIONS | words(
    """the of and to is are was were be it its this that these those have has do does did what how
    who where when why which can could will would should must my your our their his her i you we
    they he she or if there any please much many than then so because with for from by on at in a
    an as"""
)
_FOREIGN = words(
    """der das und nicht ist ein eine einen mit für von zu dem auf sich auch wird sind kein keine
    ich sie wir wie wann wo le les des et est une pas pour dans qui avec sur je vous nous ne au aux
    où quand el los las y es un una con por para del se lo su qué cómo cuándo dónde il gli che di è
    sono della come quando os uma em não como het een en niet van voor hoe wat wie que la och att
    det är inte på som jag av med ett er ikke og til nie jest w z jak co na"""
)
_FEW = 5


def is_english(tokens: Sequence[Token]) -> bool:
    """Whether a text is in the only language whose wording is understood here.

    A handful of words need not prove it: "Track order 48213" has none of the small ones.
    """
    written = [token.value for token in tokens if token.is_word]
    foreign = sum(word in _FOREIGN for word in written)
    if len(written) < _FEW:
        return not foreign and all(word.isascii() for word in written)
    english = sum(word in _ENGLISH for word in written)
    return english > foreign and 8 * english >= len(written)
