"""The negative control: problems that share nothing but their few-shot examples.

The examples are a common prefix, which exact caches reuse too. Behind it nothing may be moved, and
the share of right answers must stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvweave.kv.pool import IntArray
from kvweave_bench.quality.writer import Case, Writer

EXAMPLES = "gsm8k-cot"
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class _Problem:
    """`{things}`, `{a}` > `{b}` > `{c}` in the text, and the answer from the three numbers."""

    text: str
    answer: Callable[[int, int, int], int]


def arithmetic(writer: Writer, _: int) -> Case:
    """A problem in words behind a few that are solved; its numbers make it one of millions."""
    messages: list[tuple[str, IntArray]] = [("system", writer.tokens(_INSTRUCTION))]
    for example in writer.corpus.collection(EXAMPLES).texts[:_SHOWN]:
        messages.append(("user", writer.tokens(example.body)))
        messages.append(("assistant", writer.tokens(example.facts["solution"])))
    problem = _PROBLEMS[int(writer.rng.integers(len(_PROBLEMS)))]
    c, b, a = sorted(writer.rng.choice(range(2, 13), 3, replace=False).tolist())
    text = problem.text.format(things=writer.rng.choice(_THINGS), a=a, b=b, c=c)
    recipient = writer.chat.prompt(*messages, ("user", writer.tokens(text)))
    return Case((), recipient, text, gold=f"The answer is {problem.answer(a, b, c)}")


_INSTRUCTION = "Solve the problem and answer as in the examples."
_PROBLEMS = (
    _Problem("A shop has {a} {things} and sells {b}. How many are left?", lambda a, b, c: a - b),
    _Problem("{a} {things} lie here and {b} there. How many in all?", lambda a, b, c: a + b),
    _Problem("Each of {c} boxes holds {b} {things}. How many is that?", lambda a, b, c: b * c),
    _Problem(
        "From {a} {things} one takes {c}, then {b} are added. How many are there?",
        lambda a, b, c: a - c + b,
    ),
    _Problem("{b} {things} cost {c} coins each. What do they cost?", lambda a, b, c: b * c),
    _Problem("Twice as many as {a} {things} are needed. How many?", lambda a, b, c: 2 * a),
    _Problem(
        "A van brings {a}, {b} and {c} {things}. How many does it bring?",
        lambda a, b, c: a + b + c,
    ),
    _Problem(
        "By how many do {a} {things} outnumber {b} of them?",
        lambda a, b, c: a - b,
    ),
    _Problem(
        "Someone counts {b} {things}, finds {c} more and loses none. How many?",
        lambda a, b, c: b + c,
    ),
    _Problem(
        "In {c} days {b} {things} are made a day. How many are made?",
        lambda a, b, c: b * c,
    ),
)
_THINGS = (
    *("apples", "bottles", "bricks", "candles", "chairs", "coats", "envelopes", "keys", "lamps"),
    *("ladders", "maps", "nails", "pencils", "plates", "ropes", "seeds", "stamps", "tiles"),
    *("tickets", "wheels"),
)
