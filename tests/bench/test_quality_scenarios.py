"""Prompts of bench quality: tokens shared with their donors, and stated facts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvweave.engine.selfcheck.measure import words
from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray
from kvweave.paraphrase.facts import differing
from kvweave_bench.quality import reworded
from kvweave_bench.quality.chat import Chat
from kvweave_bench.quality.decoys import FACTS
from kvweave_bench.quality.scenarios import SCENARIOS, choose_scenarios
from kvweave_bench.quality.writer import Case, Writer
from kvweave_bench.workloads.corpus import Corpus
from kvweave_bench.workloads.oracle import shared_positions, shared_share
from support.quality_texts import keep_texts

BUILDERS = {scenario.name: scenario.build for scenario in SCENARIOS if not scenario.like}


class Words:
    """A tokenizer whose tokens are words, so that prompts can be read again."""

    chat_template = "any"

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        found = re.findall(r"\w+|[^\w\s]|\n+", text)
        return [self._ids.setdefault(word, len(self._ids)) for word in found]

    def text(self, prompt: IntArray) -> str:
        known = list(self._ids)
        return " ".join(known[at] for at in prompt)

    def text_of(self, text: str) -> str:
        """As `text` spells it."""
        return self.text(np.asarray(self.encode(text), np.int32))

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        said = "".join(f"<{each['role']}> {each['content']} <end>\n" for each in messages)
        return f"{said}<assistant>"


@pytest.fixture
def tokenizer() -> Words:
    return Words()


@pytest.fixture
def make_writer(
    make_corpus: Callable[[int], Corpus], tmp_path: Path, tokenizer: Words
) -> Callable[[int], Writer]:
    make_corpus(0)  # writes the manuals
    keep_texts(tmp_path)

    def make(seed: int) -> Writer:
        corpus = Corpus(tokenizer.encode, seed)
        return Writer(corpus, Chat(tokenizer, corpus.tokens))

    return make


def test_frame_and_contents_keep_their_tokens_apart(tokenizer: Words) -> None:
    chat = Chat(tokenizer, lambda text: np.asarray(tokenizer.encode(text), np.int32))
    document = np.asarray(tokenizer.encode("some document"), np.int32)
    system = np.asarray(tokenizer.encode("be short"), np.int32)
    prompt = chat.prompt(("system", system), ("user", document))
    expected = "< system > be short < end > < user > some document < end > < assistant >"
    assert tokenizer.text(prompt).split() == expected.split()


@pytest.mark.parametrize("template", [None, "refuses"])
def test_models_without_a_usable_template_get_plain_turns(
    tokenizer: Words, template: str | None
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise RuntimeError("system role not supported")

    tokenizer.chat_template = template  # type: ignore[assignment]
    tokenizer.apply_chat_template = refuse  # type: ignore[method-assign]
    tokens = lambda text: np.asarray(tokenizer.encode(text), np.int32)  # noqa: E731
    prompt = Chat(tokenizer, tokens).prompt(("system", tokens("be short")), ("user", tokens("why")))
    said = " ".join(tokenizer.text(prompt).split())
    assert said == "System : be short User : why Assistant :"


def series(make_writer: Callable[[int], Writer], name: str, n: int, seed: int = 1) -> list[Case]:
    writer = make_writer(seed)
    return [BUILDERS[name](writer, number) for number in range(n)]


@pytest.mark.parametrize("name", BUILDERS)
def test_same_seed_same_prompts_and_the_answer_is_in_them(
    make_writer: Callable[[int], Writer], tokenizer: Words, name: str
) -> None:
    first, again, other = (series(make_writer, name, 3, seed) for seed in (1, 1, 2))
    for case, same in zip(first, again, strict=True):
        assert case.recipient.tolist() == same.recipient.tolist()
        assert [each.tolist() for each in case.donors] == [each.tolist() for each in same.donors]
    assert first[0].recipient.tolist() != other[0].recipient.tolist()
    for case in first:
        text = tokenizer.text(case.recipient)
        assert set(words(case.question)) <= set(words(text))
        if case.gold is not None and name not in ("unrelated", "near-duplicate"):
            assert f" {case.gold} " in text
            assert case.gold in case.stated


@pytest.mark.parametrize(
    ("name", "donors", "length", "least"),
    [
        ("moved", 1, 1024, 0.85),
        ("moved-fact", 1, 1024, 0.85),
        ("reordered", 1, 1024, 0.85),
        ("reordered-8", 1, 2048, 0.9),
        ("reordered-fact", 1, 1024, 0.85),
        ("reordered-fact-8", 1, 2048, 0.9),
        ("multi-donor", 3, 1536, 0.9),
        ("multi-turn", 1, 1024, 0.85),
        ("repeat", 1, 1024, 1.0),
    ],
)
def test_recipients_share_their_text_with_their_donors(
    make_writer: Callable[[int], Writer], name: str, donors: int, length: int, least: float
) -> None:
    (case,) = series(make_writer, name, 1)
    assert len(case.donors) == donors
    assert length < len(case.recipient) < length + 240
    assert shared_share(case.recipient, case.donors) >= least


def test_passages_that_were_neighbours_are_not_any_more(
    make_writer: Callable[[int], Writer],
) -> None:
    for case in series(make_writer, "reordered", 6):
        # The frame may join the first or the last passage; two that stayed together are longer.
        assert not shared_positions(case.recipient, case.donors, min_run=320).any()


def test_near_duplicates_differ_in_the_fact_alone_and_come_in_every_arrangement(
    make_writer: Callable[[int], Writer], tokenizer: Words
) -> None:
    seen = set()
    for case in series(make_writer, "near-duplicate", 8 * len(FACTS)):
        (donor,) = case.donors
        text, asked = tokenizer.text(case.recipient), tokenizer.text_of(case.question)
        if case.gold in ("yes", "no"):
            ours, theirs = "possible .", "not possible ."
            if case.gold == "no":
                ours, theirs = theirs, ours
        else:
            ours, theirs = (tokenizer.text_of(fact or "") for fact in (case.gold, case.decoy))
        assert ours in text
        assert theirs in tokenizer.text(donor)
        assert ours != theirs
        pretended = np.asarray(tokenizer.encode(text.replace(ours, theirs)), np.int32)
        shared, would_be = (shared_positions(each, [donor]) for each in (case.recipient, pretended))
        if len(pretended) == len(case.recipient):
            changed = pretended != case.recipient
            assert not shared[changed].any()
            assert would_be[changed].all()
        assert would_be.sum() >= shared.sum() > 0.6 * len(shared)
        after = len(tokenizer.encode(text)) - len(tokenizer.encode(text[: text.rindex(ours)]))
        seen.add((case.question, text.count(ours), after < 160, asked in tokenizer.text(donor)))
    assert len(seen) == 8 * len(FACTS)
    assert {times for _, times, _, _ in seen} == {1, 2}


def test_unrelated_prompts_share_their_examples_and_no_run_beyond(
    make_writer: Callable[[int], Writer], tokenizer: Words
) -> None:
    cases = series(make_writer, "unrelated", 60)
    assert all(int((case.gold or "-1").split()[-1]) > 0 for case in cases)
    prompts = [case.recipient for case in cases]
    shortest = min(map(len, prompts))
    heads = np.stack([prompt[:shortest] for prompt in prompts])
    common = int(np.argmin((heads == heads[0]).all(axis=0)))
    assert common > 40
    for at, prompt in enumerate(prompts):
        others = [other[common:] for number, other in enumerate(prompts) if number != at]
        assert not shared_positions(prompt[common:], others).any()


def test_the_fact_that_is_asked_for_stands_in_other_words_in_the_donor(
    make_writer: Callable[[int], Writer], tokenizer: Words
) -> None:
    seen = set()
    for case in series(make_writer, "paraphrase-fact", 12):
        (donor,) = case.donors
        ours, theirs = tokenizer.text(case.recipient), tokenizer.text(donor)
        assert case.gold is not None
        stated = [tokenizer.text_of(each.format(name=NAME, value=case.gold)) for each in STATED]
        pattern = re.compile("|".join(map(re.escape, stated)).replace(NAME, r"Land\d+"))
        [in_prompt], [in_donor] = pattern.findall(ours), pattern.findall(theirs)
        assert in_prompt != in_donor
        assert len(tokenizer.encode(in_donor)) <= len(tokenizer.encode(in_prompt))
        assert case.protected_from is not None
        assert ours.index(in_prompt) < len(tokenizer.text(case.recipient[: case.protected_from]))
        asked = tokenizer.text(case.recipient[case.protected_from :])
        assert tokenizer.text_of(case.question) in asked
        seen.add(case.question.split("Land")[0])
    assert len(seen) == 4


NAME = "Nowhere"
STATED = [wording for both in reworded._TOLD.values() for wording in both]


def test_what_is_said_in_other_words_says_the_same() -> None:
    for both in reworded._TOLD.values():
        one, other = (each.format(name="Peru", value="12345") for each in both)
        assert one != other
        assert differing(one, other) is None


def test_scenarios_are_chosen_by_name() -> None:
    assert [scenario.name for scenario in choose_scenarios("repeat, moved")] == ["repeat", "moved"]
    assert choose_scenarios(None) == list(SCENARIOS)
    with pytest.raises(KvweaveError, match=r"cells are moved, .* not 'other'"):
        choose_scenarios("moved,other")
