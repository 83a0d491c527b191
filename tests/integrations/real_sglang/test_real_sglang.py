"""The plug-in in SGLang itself, with the packaged model: what is lent, what it answers, how soon.

SGLang's strict memory checks run at every step: it stops when a slot is lost or counted twice.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import ENVIRONMENT, Engine, lent, running, server_arguments

from kvweave.config import FuzzyConfig

COMMON = "Below is a list of rooms. Each has a team, a state and a door. No more is known of them."
RULES = tuple(f"{rule} {COMMON}\n" for rule in ("Answer in a few words.", "Read, and be brief."))
FUZZY = {"radix_cache_backend": "fuzzy_match"}
SETTINGS = {
    "overlapped": {},
    "paged": {"disable_overlap_schedule": True, "page_size": 16},
}
HEAD = FuzzyConfig().refresh_tokens
"""The first tokens of a run, which are computed again: --fuzzy-refresh-tokens."""


def _document(number: int, sentences: int = 4) -> str:
    """Text like no other document's."""
    chance = random.Random(number)
    rooms = [f"Room {chance.randrange(10_000)} of hall {number}" for _ in range(sentences)]
    return " ".join(
        f"{room} was checked by team {chance.randrange(10_000)} and is in state "
        f"{chance.randrange(10_000)}; its key hangs behind door {chance.randrange(10_000)}."
        for room in rooms
    )


def _prompt(rule: str, number: int, question: str, sentences: int = 4) -> str:
    return f"{rule}\nText:\n{_document(number, sentences)}\n\nQuestion: {question}\nAnswer:"


pytestmark = pytest.mark.timeout(3600)  # starting SGLang takes a minute on an idle core

PLAIN = [_prompt(f"Rule {at}.", 100 + at, f"What about {at}?") for at in range(6)]
"""Prompts that share nothing but a few words."""


def is_as_computed(probed: Sequence[dict[str, Any]]) -> bool:
    """Keys and values of the first layer are within 1e-4, absolute and relative together."""
    return all(at["key"] < 1e-4 and at["value"] < 1e-4 for at in probed if "lent" in at)


@pytest.fixture(scope="module")
def plain_answers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What SGLang answers without the plug-in."""
    with running(tmp_path_factory.mktemp("plain") / "probe", {}) as engine:
        return [engine.answer(prompt)[0] for prompt in PLAIN]


@pytest.fixture(scope="module", params=SETTINGS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    probe = tmp_path_factory.mktemp("engine") / "probe"
    with running(probe, {}, **FUZZY, **SETTINGS[request.param]) as started:
        yield started


def test_without_reuse_answers_are_those_of_sglang(
    plain_answers: list[str], engine: Engine
) -> None:
    found = [engine.answer(prompt) for prompt in PLAIN]
    assert found == [(text, 0) for text in plain_answers]


def test_a_document_is_lent_behind_instructions_that_were_never_seen(engine: Engine) -> None:
    """How much, how close the next token is, and how much sooner it comes."""
    from kvweave.engine.selfcheck.measure import kl_divergence

    sentences, n = 22, 12 if engine.page_size == 1 else 4
    _, taught = engine.first_token(_prompt(RULES[0], 1, "Which halls?", sentences))
    _, empty = engine.first_token(_prompt(RULES[0], 1, "Which halls?", 0))
    document = _tokens(taught) - _tokens(empty)
    begin = len(engine.probed())
    shares, divergences = [], []
    times: dict[str, list[float]] = {"lent": [], "computed": []}
    same = 0
    for at in range(n):
        new = f"Instruction {7 * at + 3}: in {at + 2} words, from the text only, for building {at}."
        prompt = _prompt(new, 1, f"Which door is the key behind, case {at}?", sentences)
        seconds, found = engine.first_token(prompt)
        times["lent"].append(seconds)
        shares.append(lent(found) / document)
        seconds, alone = engine.first_token(prompt, cold=f"time {at}")
        times["computed"].append(seconds)
        assert alone["meta_info"]["cached_tokens"] == 0
        warm, found = engine.next_token(prompt + " ")
        cold, _ = engine.next_token(prompt + " ", cold=f"next {at}")
        assert lent(found) > 0.85 * document, "the text before the answer is lent as well"
        divergences.append(float(kl_divergence(cold[None], warm[None])))
        same += int(cold.argmax() == warm.argmax())
    middle = {arm: statistics.median(taken) for arm, taken in times.items()}
    probed = engine.probed()[begin:]
    print(
        f"\n{_tokens(found)} tokens, document {document}; n = {n}: lent {min(shares):.3f} to "
        f"{max(shares):.3f} of the document; first token: medians {middle}, "
        f"{middle['computed'] / middle['lent']:.2f} times sooner; next token: KL mean "
        f"{statistics.mean(divergences):.4f}, most {max(divergences):.4f} nats, same {same}; "
        f"layer 0: keys {max(at['key'] for at in probed):.1e}, "
        f"values {max(at['value'] for at in probed):.1e}"
    )
    assert min(shares) >= 0.9
    assert len(probed) == 2 * n
    assert is_as_computed(probed)
    assert statistics.mean(divergences) < 0.1
    assert middle["computed"] > 2 * middle["lent"]


def _tokens(found: dict[str, Any]) -> int:
    return int(found["meta_info"]["prompt_tokens"])


@pytest.mark.parametrize("donors", [1, 3])
def test_passages_in_another_order_behind_a_new_instruction_are_all_lent(
    engine: Engine, donors: int
) -> None:
    passages = [_document(300 + 10 * donors + at) for at in range(4)]
    for donor in range(donors):
        texts = "\n".join(passages[donor::donors])
        engine.answer(f"{RULES[0]}\nTexts {donor}:\n{texts}\n\nQuestion: Which?\nAnswer:", 1)
    begin = len(engine.probed())
    # No two that follow each other in a donor: those would be one run.
    order = "\n".join(passages[at] for at in ((2, 0, 3, 1) if donors == 1 else (2, 3, 0, 1)))
    prompt = (
        f"Reader {donors}, say which hall is meant.\nTexts:\n{order}\n\nQuestion: Who?\nAnswer:"
    )
    _, tokens = engine.answer(prompt, 1)
    probed = engine.probed()[begin:]
    print(f"\n{donors} donors: {[(at['start'], at['lent']) for at in probed]}")
    assert len(probed) == 4
    assert sum(at["lent"] for at in probed) == tokens
    assert is_as_computed(probed)
    assert engine.counts()["lent_runs"] >= 4


def test_a_document_behind_a_known_rule_is_lent(engine: Engine) -> None:
    """Also at the second time: what was lent is not in the tree."""
    engine.answer(_prompt(RULES[0], 31, "Which halls?"))
    engine.answer(_prompt(RULES[1], 32, "Which halls?"))
    found = [engine.answer(_prompt(RULES[1], 31, question)) for question in ("Who?", "What door?")]
    assert all(tokens > 100 - HEAD for _, tokens in found), found


def test_who_opts_out_is_computed(engine: Engine) -> None:
    for rule, number in zip(RULES, (3, 4), strict=True):
        engine.answer(_prompt(rule, number, "Which halls?"))
    assert engine.answer(_prompt(RULES[1], 3, "What state?"))[1] > 100 - HEAD
    opted_out = {"custom_params": {"kvweave_fuzzy": False}}
    assert engine.answer(_prompt(RULES[1], 3, "Which state?"), **opted_out)[1] == 0
    assert engine.flush(), "SGLang holds slots that nobody owns"


def test_what_cannot_be_served_is_refused_at_start(tmp_path: Path) -> None:
    """The server ends, and its log says why."""
    command = [sys.executable, "-m", "sglang.launch_server", *server_arguments()]
    command += ["--radix-cache-backend", "fuzzy_match", "--disable-radix-cache"]
    environment = {**os.environ, **ENVIRONMENT}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode
    assert "--disable-radix-cache leaves nothing to take spans from" in ended.stderr
