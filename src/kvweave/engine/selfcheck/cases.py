"""The self-check's prompts: a donor, and a recipient into which the donor's KV is moved.

They are written from passages, instructions, questions, and facts that can be swapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np

from kvweave.kv.pool import IntArray

MOVED, REORDERED, NEAR_DUPLICATE = KINDS = ("moved", "reordered", "near-duplicate")
_ORDERS = ((2, 0, 3, 1), (3, 1, 0, 2), (1, 3, 2, 0), (2, 1, 3, 0))
"""No order keeps two neighbouring passages together."""


@dataclass(frozen=True, slots=True, eq=False)
class SelfCheckCase:
    """Two prompts, int32 (N). `gold` is the fact in `recipient`, `decoy` the one in `donor`."""

    kind: str
    donor: IntArray
    recipient: IntArray
    gold: str | None = None
    decoy: str | None = None


def build_cases(tokenizer: Any) -> list[SelfCheckCase]:
    """All cases in a model's tokens, the kinds alternating, so that the first few hold each kind.

    `tokenizer` is a transformers tokenizer; its chat template is used if it has one.
    """
    kinds = zip_longest(_moved(), _reordered(), _near_duplicates())
    return [
        SelfCheckCase(
            written.kind,
            _tokens(tokenizer, written.donor),
            _tokens(tokenizer, written.recipient),
            written.gold,
            written.decoy,
        )
        for written in chain.from_iterable(kinds)
        if written is not None
    ]


@dataclass(frozen=True, slots=True)
class _Written:
    """A case as two user messages."""

    kind: str
    donor: str
    recipient: str
    gold: str | None = None
    decoy: str | None = None


def _moved() -> Iterator[_Written]:
    """Three passages after another instruction and before another question."""
    for number, question in enumerate(QUESTIONS):
        text = [PASSAGES[(number + at) % len(PASSAGES)] for at in range(3)]
        yield _Written(
            MOVED,
            _message(number, text, QUESTIONS[number - 1]),
            _message(number + 1, text, question),
        )


def _reordered() -> Iterator[_Written]:
    """Four passages in another order."""
    for number, order in enumerate(_ORDERS):
        text = [PASSAGES[(2 * number + at) % len(PASSAGES)] for at in range(4)]
        yield _Written(
            REORDERED,
            _message(number, text, QUESTIONS[number]),
            _message(number, [text[at] for at in order], QUESTIONS[number]),
        )


def _near_duplicates() -> Iterator[_Written]:
    """Two passages with a fact between them whose value differs in the donor."""
    for number, fact in enumerate(FACTS):
        before, after = (PASSAGES[(number + at) % len(PASSAGES)] for at in (0, 5))
        recipient, donor = (
            [before, fact.statement.format(value), after] for value in (fact.ours, fact.theirs)
        )
        yield _Written(
            NEAR_DUPLICATE,
            _message(number, donor, fact.question),
            _message(number + 1, recipient, fact.question),
            fact.ours,
            fact.theirs,
        )


def _message(instruction: int, text: list[str], question: str) -> str:
    lines = [INSTRUCTIONS[instruction % len(INSTRUCTIONS)], *text, question]
    return "\n\n".join(" ".join(line.split()) for line in lines)


def _tokens(tokenizer: Any, message: str) -> IntArray:
    said = [{"role": "user", "content": message}]
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(f"{message}\n\nAnswer:")
    return np.array(ids, np.int32)


class Fact(NamedTuple):
    """A statement about one value, the question after it, and two values that it may have."""

    statement: str
    question: str
    ours: str
    theirs: str


INSTRUCTIONS = (
    "Read the text and answer the question.",
    "You are given a text, and below it a question. Read the whole text before you answer. Say "
    "only what the text says, in one short sentence, and do not repeat the question. If the text "
    "gives a number, a name or a date, write it down exactly as it stands there. The text may "
    "treat several subjects, one after another; most of them have nothing to do with the question.",
    "A reader has sent us the following pages and wants to know one thing about them. Answer as "
    "briefly as you can.",
    "Below are some pages of a handbook. They were put together by several authors, so that their "
    "style changes from one section to the next. Take your time, look up what is asked for at the "
    "end, and answer in a few words. Do not add an explanation.",
)
"""Instructions before a text. Their lengths differ, so the text moves by tens of tokens."""

PASSAGES = (
    """A canal lock lets a boat climb a hill without a slope. It is a chamber with a pair of
gates at either end. The boat enters from the lower water, the gates close behind it, and small
sluices let water run in from above until the level inside is that of the upper canal. Then the
upper gates, which the weight of the water had held shut, can be pushed open by hand. No pump is
needed: every passage costs the upper canal one chamber of water, and rain or a reservoir has to
bring it back. Where boats are many and water is scarce, side ponds keep half of each chamber
for the next boat. Long flights of locks are slow, and crews used to race for the right to enter
first.""",
    """Bread rises because yeast feeds on sugar and gives off gas. Kneading has joined the
proteins of the flour into a net, and the net holds the gas in small bubbles. A warm kitchen
makes the dough rise in an hour, a cool cellar in a night, and the slow way tastes better, since
bacteria have time to make acids. In the oven the bubbles grow once more, then the starch sets
around them and keeps their shape. The crust browns only where the surface is dry and hot, which
is why bakers let steam in at first and out again later. A loaf that is cut while hot seems wet
inside, because its starch has not yet taken up all the water. An old loaf is not dry either:
its starch has become stiff.""",
    """The sea rises and falls twice a day because the moon pulls the near side of the earth
more than its centre, and the centre more than the far side. Two bulges of water stand opposite
each other, and the coasts turn through them. The sun does the same at half the strength. When
both pull along one line, at new and at full moon, the tides are high; when they pull across
each other, they are low. The shape of a bay decides the rest. In a long funnel the wave runs up
as on a swing that is pushed in time, and may reach ten metres, while an inland sea hardly
notices. Harbours print tables for a year ahead, and a strong wind can still be an hour early.""",
    """A lighthouse does not need a strong lamp as much as it needs a good lens. A plain lamp
sends most of its light to the sky and into the ground. Rings of glass around the lamp bend that
light until all of it leaves as one flat beam, and because only the edge of a lens bends light,
the thick middle can be left out: the rings are thin, and the whole is light enough to be turned
by clockwork. It floats on a trough of mercury, so that one finger can start it. Each tower has
its own rhythm of flashes and pauses, written in the list of lights, and a crew that counts the
seconds knows which coast it sees. In fog the light is of little use, and a horn takes its
place.""",
    """Honey bees keep their nest at the warmth of a human body, whatever the weather. In summer
they carry water in, spread it on the combs and fan with their wings. In winter they gather in a
ball around the stores, shiver with the muscles that otherwise move the wings, and change
places, so that each is on the outside only for a while. They eat honey to do so, about a jar a
week in the coldest months. A keeper who opens the hive in frost does harm that cannot be made
good before spring. In the first mild days they all fly out at once, because they have waited
for weeks to relieve themselves, and washing on a line nearby will show it.""",
    """A steel bridge is longer in summer than in winter, by a hand's breadth for every two
hundred metres. If both its ends were fixed, it would bend or break its piers. So one end rests
on rollers or on a block of rubber, and the road has a joint there: steel fingers that reach
between each other and slide. The knock that one hears when a car drives over a bridge comes
from this joint. Rails were once laid with gaps for the same reason. Today they are welded, and
pulled tight when they are laid, so that they push only on hot days and pull on cold ones; the
ballast around the sleepers has to be heavy enough to hold them in either case.""",
    """Paper is a felt of plant fibres. Rags were beaten in water until nothing was left but
single threads, and a sheet was scooped out with a sieve, pressed and hung up to dry. Wood
serves as well, once the stuff that makes it stiff has been boiled out of it; paper from which
it was not removed turns yellow in the sun, as newspapers do. Chalk makes a sheet white and
smooth, size keeps ink from running. All fibres lie more or less in the direction in which the
machine ran, and a sheet folds and tears better along that line. Fibres grow shorter each time
they are used again, so that after six or seven rounds they are too short to hold together and
end as egg boxes.""",
    """A pendulum takes the same time for a wide swing as for a narrow one, as long as neither
is very wide. A clock makes use of that: at each swing a small anchor lets one tooth of a wheel
go by, and the tooth gives the pendulum a little push in return. What decides the rate is the
length of the rod alone, and not the weight at its end. A rod of brass grows in the warmth and
makes the clock lose some seconds a day. Good clocks therefore carry a jar of mercury, which
rises as the rod sinks, or rods of two metals that undo each other's growth. On a mountain a
clock is slow as well, because the pull of the earth is weaker there, and travellers once
measured the earth's shape by it.""",
    """A glacier is a river of ice. Snow that does not melt in summer is pressed by the snow of
later years until the air is gone, and ice under such weight flows, slower than the hour hand of
a watch. The middle moves faster than the sides, as in any river, and where the ground drops
steeply the surface breaks into blocks and clefts. It carries whatever falls on it, from dust to
boulders as big as houses, and leaves them in a wall where it ends. If less snow falls or more
melts, the end draws back, although the ice itself still moves down the valley. The brook below
is grey from the rock that has been ground to flour, and a lake that it fills shines in a milky
blue.""",
    """Compost is not rotten when it is well made. The heap has to be damp as a wrung-out sponge
and loose enough for air. Then bacteria that need air win, and within days the middle becomes
too hot to touch, which kills the seeds of weeds. Grass alone becomes a smelly mat, twigs alone
stay twigs for years, and a mixture of both is right. Someone who turns the heap after a month
has earth by autumn. Worms come when it has cooled and leave when nothing is left to eat. Peel
of citrus fruit, which is said to do harm, only takes longer, and paper may go in as long as it
is plain. Ash is better spread thin over the beds, and bones attract guests that nobody wants.""",
)
"""Of about 180 tokens each, and about different things, so that their order does not matter."""

QUESTIONS = (
    "Which subject does the text treat first?",
    "Name one thing that the text says about water.",
    "What does the text say happens in winter?",
    "Which material is mentioned most often in the text?",
    "What would surprise a reader of this text?",
    "Give the text a title of three words.",
)

FACTS = (
    Fact(
        "The file number of this handbook is {}.",
        "What is the file number of this handbook?",
        "KR-4821",
        "KR-7821",
    ),
    Fact(
        "At most {} copies of these pages may be made.",
        "How many copies of these pages may be made?",
        "340",
        "615",
    ),
    Fact(
        "The cable for the lamp in the reading room is {} long.",
        "How long is the cable for the lamp?",
        "38 metres",
        "38 feet",
    ),
    Fact(
        "Questions about these pages go to the office in {}.",
        "In which city is the office for questions?",
        "Lisbon",
        "Vienna",
    ),
    Fact(
        "The next edition of this handbook appears on {}.",
        "On which day does the next edition appear?",
        "14 March 2031",
        "14 August 2031",
    ),
    Fact(
        "The reading room is open on {}.",
        "On which day is the reading room open?",
        "Tuesday",
        "Friday",
    ),
    Fact(
        "The password for visitors of the library is {}.",
        "What is the password for visitors?",
        "granite",
        "lantern",
    ),
    Fact(
        "The printer of this handbook charges {} euros for a box.",
        "How many euros does a box cost?",
        "72",
        "27",
    ),
    Fact(
        "The handbook was first printed in {}.",
        "In which year was the handbook first printed?",
        "1974",
        "1986",
    ),
    Fact(
        "The cover of this handbook is {}.",
        "Which colour is the cover of this handbook?",
        "green",
        "orange",
    ),
    Fact(
        "The door of the archive is opened with key {}.",
        "Which key opens the door of the archive?",
        "B17",
        "D52",
    ),
    Fact(
        "The temperature in the archive is kept at {} degrees.",
        "At how many degrees is the archive kept?",
        "16",
        "19",
    ),
)
"""Near-duplicates: two texts that differ in one of these values and in nothing else."""
