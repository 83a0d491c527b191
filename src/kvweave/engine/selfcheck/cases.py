"""Prompt pairs of the self-check: a donor, and a recipient into which the donor's KV is moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from kvweave.engine.selfcheck.texts import FACTS, INSTRUCTIONS, PASSAGES, QUESTIONS
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
