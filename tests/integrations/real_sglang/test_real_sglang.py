"""The plug-in in SGLang itself: what is served, what it answers, and that its memory adds up.

SGLang's strict memory checks run at every step: it stops when a slot is lost or counted twice.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import ENVIRONMENT, Engine, lent, running, server_arguments

COMMON = "Below is a list of rooms. Each has a team, a state and a door. No more is known of them."
"""Ends both rules, so that a page that holds the end of one is found behind the other, too."""
RULES = tuple(f"{rule} {COMMON}\n" for rule in ("Answer in a few words.", "Read, and be brief."))
FUZZY = {"radix_cache_backend": "fuzzy_match"}
SETTINGS = {
    "overlapped": ({}, {}),
    "paged, chunked, retracted": (
        {"SGLANG_TEST_RETRACT": "1"},
        {"disable_overlap_schedule": True, "page_size": 16, "chunked_prefill_size": 128},
    ),
}


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


pytestmark = pytest.mark.timeout(1800)  # starting SGLang takes a minute on an idle core

PLAIN = [_prompt(f"Rule {at}.", 100 + at, f"What about {at}?") for at in range(6)]
"""Prompts that share nothing but a few words."""


@pytest.fixture(scope="module")
def plain_answers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What SGLang answers without the plug-in."""
    with running(tmp_path_factory.mktemp("plain") / "probe", {}) as engine:
        return [engine.answer(prompt)[0] for prompt in PLAIN]


@pytest.fixture(scope="module", params=SETTINGS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    environment, arguments = SETTINGS[request.param]
    probe = tmp_path_factory.mktemp("engine") / "probe"
    with running(probe, environment, **FUZZY, **arguments) as started:
        yield started


def test_without_reuse_answers_are_those_of_sglang(
    plain_answers: list[str], engine: Engine
) -> None:
    found = [engine.answer(prompt) for prompt in PLAIN]
    assert found == [(text, 0) for text in plain_answers]


def test_a_moved_document_is_lent_and_its_keys_are_as_fresh_ones(engine: Engine) -> None:
    engine.answer(_prompt(RULES[0], 1, "Which halls?"))
    engine.answer(_prompt(RULES[1], 2, "Which halls?"))
    before = len(engine.probed())
    found = [engine.answer(_prompt(RULES[1], 1, question)) for question in ("Who?", "What door?")]
    assert all(tokens > 100 for _, tokens in found), found
    probed = engine.probed()[before:]
    assert len(probed) >= 2
    assert all(at["key"] < 1e-4 and at["value"] < 1e-4 for at in probed), probed


def test_who_opts_out_is_computed(engine: Engine) -> None:
    for rule, number in zip(RULES, (3, 4), strict=True):
        engine.answer(_prompt(rule, number, "Which halls?"))
    assert engine.answer(_prompt(RULES[1], 3, "What state?"))[1] > 100
    opted_out = {"custom_params": {"kvweave_fuzzy": False}}
    assert engine.answer(_prompt(RULES[1], 3, "Which state?"), **opted_out)[1] == 0


def test_two_hundred_mixed_requests_leave_nothing_behind(engine: Engine) -> None:
    """Known and new documents behind known rules, eight at a time, twice what the pool holds."""
    chance = random.Random(5)
    before = len(engine.probed())
    served = retracted = 0
    for batch in range(25):
        prompts = [
            _prompt(chance.choice(RULES), chance.randrange(40), f"What of {batch}-{at}?")
            for at in range(8)
        ]
        for found in engine.ask(prompts, 6):
            served += lent(found) > 0
            retracted += found["meta_info"]["num_retractions"]
            assert found["meta_info"]["completion_tokens"] == 6
    probed = engine.probed()[before:]
    print(f"{served} of 200 lent, {len(probed)} spans in all, {retracted} retractions")
    assert served > 20
    assert all(at["key"] < 1e-4 and at["value"] < 1e-4 for at in probed)
    assert engine.flush(), "SGLang holds slots that nobody owns"


def test_the_first_token_comes_sooner(tmp_path: Path) -> None:
    """Each long document once computed and once lent, alternately; medians of both."""
    with running(tmp_path / "probe", {"KVWEAVE_PROBE": ""}, **FUZZY) as engine:
        for at, rule in enumerate(RULES):
            engine.first_token(_prompt(rule, 90 + at, "Warm?"))
        times: dict[str, list[float]] = {"computed": [], "lent": []}
        for number in range(200, 207):
            for arm, rule in zip(times, RULES, strict=True):
                times[arm].append(engine.first_token(_prompt(rule, number, "Which?", 20)))
        [last] = engine.ask([_prompt(RULES[1], 206, "Where?", 20)], 1)
    middle = {arm: statistics.median(taken) for arm, taken in times.items()}
    print(f"first token, n = 7, {last['meta_info']['prompt_tokens']} tokens: {middle}")
    assert middle["computed"] > 2 * middle["lent"]


def test_what_cannot_be_served_is_refused_at_start() -> None:
    """The server ends, and its log says why."""
    command = [sys.executable, "-m", "sglang.launch_server", *server_arguments()]
    command += ["--radix-cache-backend", "fuzzy_match", "--disable-radix-cache"]
    environment = {**os.environ, **ENVIRONMENT}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode
    assert "--disable-radix-cache leaves nothing to take spans from" in ended.stderr
