"""Compares the facts of two texts: equal, except for changes that cannot change a fact.

Cosine similarity cannot tell "cancel it" from "do not cancel it", nor 15 % from 50 %: it nominates,
and `differing` decides. Both texts are brought into a normal form, and the forms are compared
character by character. There are no synonyms, no equivalent phrases and no other word orders: such
rules are right in most sentences and wrong in some, and a rule cannot tell which.

A text is read as English prose only if every part of it is a plain word or number and its words are
those of English; of everything else (code, quotations, lists, other languages) the normal form is
the text itself. In English prose, these are the same:

- one space and two between sentences; a space and a no-break space
- composed and decomposed letters; a straight and a curved apostrophe in a contraction
- "don't" and "do not" behind a pronoun and before a common verb; "I'm" and "I am"
- 1,500 and 1500, five and 5, between a verb like "are" and things that are counted whole
- an order or question in the first person with and without a greeting or a "please" around it
- a question that begins with a capital or a small letter
"""

from __future__ import annotations

import re
import unicodedata
from typing import Protocol


class Verifier(Protocol):
    """Says why a donor's text must not stand in for a recipient's; None if nothing speaks against.

    Called with whole sentences, one call at a time, on a thread that is not the engine's. It only
    ever vetoes: to raise, or to come late, is to veto.
    """

    def __call__(self, donor: str, recipient: str) -> str | None: ...


def differing(donor: str, recipient: str) -> str | None:
    """None if both texts have one normal form; else one sentence that says where they differ.

    Both should begin and end where sentences do, with the white space around them: that of code
    counts. Symmetric, but for who is called the donor.
    """
    ours, theirs = normal(donor), normal(recipient)
    if ours == theirs:
        return None
    before, behind = _PARTS.findall(ours), _PARTS.findall(theirs)
    while before and behind and before[0] == behind[0]:
        del before[0], behind[0]
    while before and behind and before[-1] == behind[-1]:
        del before[-1], behind[-1]
    return f"texts differ: {_shown(before)} in the donor, {_shown(behind)} in the recipient"


def normal(text: str) -> str:
    """The one form of all texts that differ from this one in nothing that could be a fact.

    normal(normal(text)) == normal(text).
    """
    while (simpler := _simpler(text)) != text:
        text = simpler
    return text


def literal(before: str) -> bool:
    """Whether what follows this text stands in code or in a quotation, where characters count.

    A sentence does not show it if the mark that opens either stands in front of it.
    """
    paragraph = before[before.rfind("\n\n") + 1 :]
    if any(before.count(fence) % 2 for fence in _FENCES) or _CODE_LINE.search(paragraph):
        return True
    if paragraph.count('"') % 2 or paragraph.count("`") % 2:
        return True
    return _is_open(_TAGS, before) or _is_open(_QUOTES, paragraph)


def _is_open(marks: tuple[re.Pattern[str], re.Pattern[str]], text: str) -> bool:
    """Whether the last mark that opens stands behind the last one that closes."""
    opened, closed = (
        max((match.end() for match in each.finditer(text)), default=0) for each in marks
    )
    return opened > closed


_PARTS = re.compile(r"\w+|\s+|[^\w\s]")
_FENCES = ("```", "~~~", '"""', "'''")
_CODE_LINE = re.compile(r"^(?:  |\t| ?(?:>|#|//|\||\$ |--))|[={};\\]|<<", re.MULTILINE)
_TAG = r"(?:blockquote|code|kbd|pre|q|samp|script|style)\b"
_TAGS = (re.compile(f"<{_TAG}"), re.compile(f"</{_TAG}"))
_QUOTES = (
    re.compile(r"[\u201c\u201e\u00ab]|(?<![^\s(\[])['\u2018](?=\S)"),
    re.compile(r"[\u201d\u00bb]|(?<=\S)['\u2019](?!\w)"),
)
"""Both: what opens, and what closes."""


def _shown(parts: list[str]) -> str:
    text = "".join(parts)
    return repr(text if len(text) <= 40 else text[:37] + "...") if text else "nothing"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _simpler(text: str) -> str:
    """One pass over a text; the text itself if it is not English prose."""
    composed = unicodedata.normalize("NFC", text).replace("\u00a0", " ")
    said = composed.removeprefix(" ").rstrip()
    words = _TYPED.sub(" ", _APOSTROPHE.sub("'", said)).split(" ")
    if not _is_plain(words) or not _is_english(words):
        return text
    sentences: list[list[str]] = [[]]
    for word in words:
        sentences[-1].append(word)
        if word[-1] in ".?!":
            sentences.append([])
    is_whole = len(text) < _CUT
    simpler = " ".join(_sentence(sentence, is_whole) for sentence in sentences[:-1])
    # What stands around the text stays: a line's end, and the indentation of the next line.
    return composed.replace(said, simpler)


_CUT = 128
"""Characters. Of a longer text, the gate may see a part, so that it begins within a sentence."""
_APOSTROPHE = re.compile("\u2019(?=(?:m|re|s|t|ve)\\b)")
_TYPED = re.compile(r"(?<=[.?!])  (?=[A-Z])")
"""Two spaces between sentences, as some type them; elsewhere they may align columns."""
_CHUNK = re.compile(
    r"""
    (?: (?P<word> [^\W\d_]+ (?:['-][^\W\d_]+)* )
      | [$\u00a3\u20ac]? (?:[1-9]\d{0,2}(?:,\d{3})+ | \d+) (?:\.\d+)? %?
      | [^\W_]+ (?:-[^\W_]+)*
    ) (?P<mark> [,.?!]? )
    """,
    re.VERBOSE,
)


def _is_plain(words: list[str]) -> bool:
    """Whether the text is nothing but words and numbers in sentences, in Latin letters, and not
    about wording."""
    matches = [_CHUNK.fullmatch(word) for word in words]
    if not all(matches) or words[-1][-1] not in ".?!":
        return False
    said = {match["word"].lower() for match in matches if match and match["word"]}
    letters = set("".join(said)) - {"'", "-"}
    return (
        _FOREIGN.isdisjoint(said)
        and _MENTIONING.isdisjoint(said)
        and all(unicodedata.name(letter, "").startswith("LATIN") for letter in letters)
    )


def _is_english(words: list[str]) -> bool:
    said = [word.lower().rstrip(",.?!").split("'")[0] for word in words]
    english = [word for word in said if word in _ENGLISH]
    return len(set(english)) >= 2 and 4 * len(english) >= len(words)


_ENGLISH = _words("""
a about above after again all also am an and any are as at away be because been before behind below
between both but by can cannot could did do does doesn don down during each either every few for
from had has have he her here his how i if in into is isn it its just least less many may me might
more most much must my near need never no nor not of off often on once only or other our out over
own please she should since so some still such than that the their them then there these they this
those through to too under until up upon us was we were what when where whether which while who
whom whose why will with without won would yet you your
""")
_FOREIGN = _words("""
aber al auf aus av bei beim che con da dans das de deg del della dem den der des det di die dos du
een ein eine einen einer el en er es est et ett f\u00fcr gli het il im ist je jeg keine la las le
les los mais mit na nach nicht niet och od ohne og oder onze ou para pas pero por pour que qui sans
se si sich sie sind som sur till um un una und une van vom von voor vous wir za zum zur
""")
"""Small words of other languages. Some are English as well: a text in doubt stands as it is."""
_MENTIONING = _words("""
accent album answer answers apostrophe argument bracket button called capitals caption character
characters chorus clause click code codes column columns comma command commands comment comments
copy dialog digit digits display enter error errors expression field file filename files film
folder format function grammar greet greeting headline hear heard identifier input joke key keys
keyword label language letter letters line lines literal log login logs lyrics mean meaning means
menu message messages mode motto movie name named names notation noun option output paragraph
password path phrase phrases play played playing plays poem polite politely print prints pronounce
proverb punctuation query quotation quote quoted quotes read reading reads recite regex repeat
replied reply response rhyme said sang saw say saying says screen script search sentence sentences
setting sign sing singing sings slogan song songs sound sounds space spaced spaces speech spell
spelling spells spelt string sung syllable tag term text texts title titled titles token tokens
track tracks translate translated translation type typed types url username utterance value
variable verb verse version voice wording word words write writes writing written wrote
""")
"""Words that speak of words: where one stands, the wording may be the fact."""


def _sentence(words: list[str], is_whole: bool) -> str:
    """One sentence of prose, from its first word to its mark."""
    if not _is_english(words):
        return " ".join(words)
    _count(words)
    _expand(words)
    sentence = " ".join(words)
    return _bare(sentence) if is_whole else sentence


_NUMERAL = re.compile(r"[1-9]\d{0,2}(?:,\d{3})*")


def _numbered(text: str, first: int, step: int = 1) -> dict[str, int]:
    return {word: first + step * at for at, word in enumerate(text.split())}


_ONES = _numbered("one two three four five six seven eight nine", 1)
_TENS = _numbered("twenty thirty forty fifty sixty seventy eighty ninety", 20, 10)
_TEENS = _numbered(
    "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen", 10
)
_COMPOUND = {f"{ten}-{one}": _TENS[ten] + _ONES[one] for ten in _TENS for one in _ONES}
_NUMBERS = {word: str(number) for word, number in (_ONES | _TEENS | _TENS | _COMPOUND).items()}
_BEFORE_NUMBER = _words("are were has have had than exactly")
_WHOLE = _words("""
adults cars chairs children customers employees guests houses members men participants passengers
patients people players pupils residents students teachers tickets tourists users visitors voters
women workers
""")
"""What is counted in whole numbers, so that the comma of 1,500 cannot be a decimal one."""


def _count(words: list[str]) -> None:
    """Write numbers of whole things in digits, without commas."""
    for at in range(1, len(words) - 1):
        word = words[at]
        if words[at - 1] in _BEFORE_NUMBER and words[at + 1].rstrip(",.?!") in _WHOLE:
            if word in _NUMBERS:
                words[at] = _NUMBERS[word]
            elif _NUMERAL.fullmatch(word):
                words[at] = word.replace(",", "")


_PRONOUNS = _words("I you we they he she it who You We They He She It Who")
_NEGATED = {"don't": "do not", "doesn't": "does not", "didn't": "did not", "can't": "cannot",
            "won't": "will not"}  # fmt: skip
_VERBS = _words("""
accept agree allow apply arrive believe belong buy cancel cost eat exist expect fit forget get have
help keep know leave live need offer own pay receive remember remove see sell send start stop take
think understand use want work
""")
_CONTRACTED = {"I'm": "I am", "I've": "I have"} | {
    f"{first}{end}": f"{first} {whole}"
    for subject in ("you", "we", "they")
    for first in (subject, subject.capitalize())
    for end, whole in (("'re", "are"), ("'ve", "have"))
}
_JOINING = _words("although and because but if since that though unless")


def _expand(words: list[str]) -> None:
    """Write contractions out that can only be read in one way.

    Not so: 's (is, has, does, us), 'd (had, would), 'll (will, shall); isn't, couldn't and others
    of which the long form may deny what follows instead: his plan is not to pay, he could not pay;
    "can not" for the same reason. Capitals behind it make a name: I'm a Celebrity.
    """
    for at, word in enumerate(words[:-1]):
        before, behind = words[max(at - 1, 0) : at], words[at + 1 : at + 3]
        if any(other[0].isupper() for other in behind):
            continue
        is_verb = behind[0].rstrip(",.?!") in _VERBS
        if word in _NEGATED and is_verb and not _PRONOUNS.isdisjoint(before):
            words[at] = _NEGATED[word]
        elif word in _CONTRACTED and _JOINING.issuperset(before):
            words[at] = _CONTRACTED[word]


_VERB = "bring|describe|explain|give|remove|send|tell"
_REST = r"(?:(?!\bplease\b)[^,.?!])+"
_WHAT = rf" (?:me|us|the|a|an|my|our|your|his|her|their) {_REST}"
_ORDER = rf"(?P<bare>(?:{_VERB}){_WHAT})"
_BEGUN = rf"(?P<bare>(?:{_VERB.title()}){_WHAT})"
_NO_ECHO = r"(?!.*\b(?:this|that|these|those|it|its|hello|hi|hey)\b)"
"""What is asked about may be the courtesy itself: Hello, where do I put that?"""
_PRACTICAL = (
    r"(?P<bare>(?:(?:[Hh]ow|[Ww]hen|[Ww]here) (?:can|do|did|should)|[Cc]an) (?:I|we) "
    rf"{_NO_ECHO}{_REST})"
)
_WHAT_IS = rf"(?P<bare>What (?:is|are) (?:the|my|our|your) {_NO_ECHO}{_REST})"
_COURTEOUS = (
    (re.compile(rf"(?:Can|Could) you please {_ORDER}\?"), "."),
    (re.compile(rf"Please,? {_ORDER}\."), "."),
    (re.compile(rf"{_BEGUN}, please\."), "."),
    (re.compile(rf"(?:(?:Hello|Hey|Hi|Please), )?{_PRACTICAL}(?:, please)?\?"), "?"),
    (re.compile(rf"{_WHAT_IS}, please\?"), "?"),
)


def _bare(sentence: str) -> str:
    """An order or question without the courtesy around it, and with a capital.

    "Please" is one only where no verb can be meant, as in "please the crowd"; an order in the form
    of a question ends as an order.
    """
    for pattern, mark in _COURTEOUS:
        if match := pattern.fullmatch(sentence):
            bare = match["bare"]
            return bare[0].upper() + bare[1:] + mark
    return sentence
