"""Scenarios in which text returns, each as prompts with known answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray
from kvweave_bench.quality import control, decoys, reworded
from kvweave_bench.quality.writer import Asked, Case, Writer

_PASSAGE = 256
_SHORTEST = 192
"""Tokens of the shortest retrieved passage in which a country can be told of."""
_DOCUMENT = 1024
_WRAPPER = 512
"""Tokens left for instruction, question and answer where a document fills the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One kind of prompt. `build` writes the case of a given number.

    `weight`: cases per --n. `answer`: most tokens of an answer. `lives`: caches are not emptied
    between cases, and earlier cases are the donors. `all_variants` is False where nothing is moved
    that a refresh could improve; `rerun` where nothing is reused at all. `provider` nominates
    donors. `like` names the scenario whose prompts these are. `against`: the provider behind the
    reference answers; None: they are cold.
    """

    name: str
    summary: str
    build: Callable[[Writer, int], Case]
    weight: int = 1
    answer: int = 24
    lives: bool = False
    all_variants: bool = True
    rerun: bool = False
    provider: str = "spans"
    like: str = ""
    against: str | None = None


def moved(length: int) -> Callable[[Writer, int], Case]:
    """One stretch of a manual, another instruction before it and another question after it."""

    def build(writer: Writer, _: int) -> Case:
        document = writer.corpus.take(writer.length(length))
        about = str(writer.rng.choice(_ABOUT_A_DOCUMENT))
        return Case((writer.prompt(document),), writer.prompt(document, about), about)

    return build


def reordered(documents: int) -> Callable[[Writer, int], Case]:
    """A bank's documents in another order, no two neighbours as before; one is asked for."""

    def build(writer: Writer, _: int) -> Case:
        held = writer.documents(documents, writer.length(_PASSAGE))
        about = f"What does the document '{held[int(writer.rng.integers(documents))][0]}' say?"
        parts = [tokens for _, tokens in held]
        donor = writer.prompt(np.concatenate(parts))
        body = np.concatenate([parts[at] for at in _shuffled(writer, documents)])
        return Case((donor,), writer.prompt(body, about), about)

    return build


def moved_fact(writer: Writer, _: int) -> Case:
    """One text, another instruction before it; a fact in it is asked for."""
    asked = writer.asked(writer.length(_DOCUMENT))
    return _case(asked, (writer.prompt(asked.passage),), asked.passage, writer)


def reordered_fact(passages: int) -> Callable[[Writer, int], Case]:
    """The same passages in another order, no two of them neighbours as before."""

    def build(writer: Writer, _: int) -> Case:
        held = [writer.asked(writer.length(_PASSAGE)) for _ in range(passages)]
        order = _shuffled(writer, passages)
        donor = writer.prompt(_joined(held))
        asked = held[int(writer.rng.integers(passages))]
        return _case(asked, (donor,), _joined([held[at] for at in order]), writer)

    return build


def several_donors(writer: Writer, _: int) -> Case:
    """Six passages, two from each of three earlier prompts of three."""
    length = writer.length(_PASSAGE)
    prompts = [[writer.asked(length) for _ in range(3)] for _ in range(3)]
    picked = [held[at] for held in prompts for at in writer.rng.choice(3, 2, replace=False)]
    mixed = [picked[at] for at in writer.rng.permutation(len(picked))]
    donors = tuple(writer.prompt(_joined(held)) for held in prompts)
    return _case(mixed[int(writer.rng.integers(len(mixed)))], donors, _joined(mixed), writer)


def retrieved(writer: Writer, _: int) -> Case:
    """Eight passages of 128 to 512 tokens, each known from an earlier prompt of four, any order."""
    lengths = writer.rng.integers(_SHORTEST, 2 * _PASSAGE + 1, 8)
    held = [writer.asked(writer.length(int(length))) for length in lengths]
    donors = tuple(writer.prompt(_joined(part)) for part in (held[:4], held[4:]))
    mixed = [held[at] for at in writer.rng.permutation(8)]
    return _case(mixed[int(writer.rng.integers(8))], donors, _joined(mixed), writer)


def shifted_header(writer: Writer, _: int) -> Case:
    """A conversation goes on by one turn, behind a system message that has become longer."""
    turns = [writer.asked(writer.length(_PASSAGE)) for _ in range(4)]
    history: list[tuple[str, IntArray]] = []
    for turn in turns:
        said = np.concatenate([turn.passage, writer.tokens(f"\n\n{turn.question}")])
        history += [("user", said), ("assistant", writer.tokens(turn.stated))]
    then, now = (writer.tokens(_HEADER.format(more)) for more in ("", _MORE))
    asked = turns[int(writer.rng.integers(len(turns)))]
    question = f"Once more, please: {asked.question}"
    donor = writer.chat.prompt(("system", then), *history[:-1])
    recipient = writer.chat.prompt(("system", now), *history, ("user", writer.tokens(question)))
    return Case((donor,), recipient, question, asked.stated, asked.gold)


def repeated(writer: Writer, _: int) -> Case:
    """The very same prompt."""
    asked = writer.asked(writer.length(_DOCUMENT))
    recipient = writer.prompt(asked.passage, asked.question)
    return Case((recipient,), recipient, asked.question, asked.stated, asked.gold)


def alone(writer: Writer, _: int) -> Case:
    """A prompt that nothing came before."""
    asked = writer.asked(writer.length(_DOCUMENT))
    recipient = writer.prompt(asked.passage, asked.question)
    return Case((), recipient, asked.question, asked.stated, asked.gold)


def _in_other_words(
    name: str, summary: str, build: Callable[[Writer, int], Case]
) -> tuple[Scenario, Scenario, Scenario]:
    """Three scenarios: all reuse, reuse without paraphrases, and paraphrases alone."""
    whole = Scenario(name=name, summary=summary, build=build, provider="semantic")
    without = replace(
        whole,
        name=f"{name}-moved",
        summary="the same prompts, of which only what is there word for word is served",
        provider="spans",
        like=name,
    )
    alone = replace(
        whole,
        name=f"{name}-alone",
        summary="the same prompts, compared not with cold answers but with those",
        like=name,
        against="spans",
    )
    return whole, without, alone


def choose_scenarios(names: str | None, beside: tuple[str, ...] = ()) -> list[Scenario]:
    """Cells out of `name,name`, all of them without names; KvweaveError for what is none.

    Names in `beside` are known too, and left to the caller.
    """
    if names is None:
        return list(SCENARIOS)
    known = {scenario.name: scenario for scenario in SCENARIOS}
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in (*known, *beside):
            raise KvweaveError(f"cells are {', '.join((*known, *beside))}, not {name!r}")
    return [known[name] for name in wanted if name in known]


SCENARIOS = (
    Scenario(
        name="moved",
        summary="one document of 1,024 tokens behind another wrapper",
        build=moved(_DOCUMENT),
    ),
    Scenario(
        name="moved-4k",
        summary="one document of 4,096 tokens behind another wrapper",
        build=moved(4 * _DOCUMENT),
    ),
    Scenario(
        name="moved-8k",
        summary="one document of 8,000 tokens less the wrapper behind another wrapper",
        build=moved(8 * _DOCUMENT - _WRAPPER),
    ),
    Scenario(
        name="moved-fact",
        summary="1,024 tokens of mixed sentences behind another wrapper, a fact in them asked for",
        build=moved_fact,
    ),
    Scenario(
        name="reordered",
        summary="four documents of 256 tokens in another order",
        build=reordered(4),
    ),
    Scenario(
        name="reordered-8",
        summary="eight documents of 256 tokens in another order",
        build=reordered(8),
    ),
    Scenario(
        name="reordered-fact",
        summary="four passages of 256 tokens of mixed sentences in another order, a fact asked for",
        build=reordered_fact(4),
    ),
    Scenario(
        name="reordered-fact-8",
        summary="eight such passages in another order",
        build=reordered_fact(8),
    ),
    Scenario(
        name="multi-donor",
        summary="six passages of 256 tokens out of three earlier prompts",
        build=several_donors,
    ),
    Scenario(
        name="rag-8",
        summary="eight retrieved passages of 128 to 512 tokens in any order, a fact asked for",
        build=retrieved,
    ),
    Scenario(
        name="near-duplicate",
        summary="a document that differs from the donor's in one fact, which is asked for",
        build=decoys.near_duplicate,
        weight=5,
        answer=16,
    ),
    Scenario(
        name="multi-turn",
        summary="a conversation goes on behind a longer system message",
        build=shifted_header,
    ),
    *_in_other_words(
        "paraphrase-fact",
        "a document with four sentences in other words; a fact in one of them is asked for",
        reworded.reworded_facts,
    ),
    Scenario(
        name="repeat",
        summary="the very same prompt again",
        build=repeated,
        all_variants=False,
    ),
    Scenario(
        name="rerun",
        summary="a prompt computed twice from its first token on, in chunks of another size: noise",
        build=alone,
        rerun=True,
    ),
    Scenario(
        name="unrelated",
        summary="arithmetic with nothing in common but the examples at the prompts' beginning",
        build=control.arithmetic,
        weight=9,
        answer=32,
        lives=True,
        all_variants=False,
    ),
)
_ABOUT_A_DOCUMENT = (
    "What is this text about?",
    "Which programs are named in it?",
    "What should a newcomer be warned about?",
    "What has to be done first?",
    "Summarise the last part in one sentence.",
)
_HEADER = "You are a helpful assistant. Answer in one short sentence.{}"
_MORE = (
    " This conversation was resumed after a break; the user has read all earlier answers and does "
    "not need to be reminded of them."
)


def _shuffled(writer: Writer, count: int) -> IntArray:
    """An order that keeps no two neighbours together."""
    order = writer.rng.permutation(count)
    while np.any(np.diff(order) == 1):
        order = writer.rng.permutation(count)
    return order.astype(np.int32)


def _joined(passages: list[Asked]) -> IntArray:
    return np.concatenate([each.passage for each in passages])


def _case(asked: Asked, donors: tuple[IntArray, ...], body: IntArray, writer: Writer) -> Case:
    recipient = writer.prompt(body, asked.question)
    return Case(donors, recipient, asked.question, asked.stated, asked.gold)
