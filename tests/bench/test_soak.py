"""The soak: a short one ends well, and each kind of problem is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvweave_bench.soak import model, oracle, variants
from kvweave_bench.soak.client import Reply
from kvweave_bench.soak.oracle import Claim
from kvweave_bench.soak.verdicts import verdict
from kvweave_bench.soak.watch import Sample, leaks, trend
from kvweave_bench.soak.workload import Case, Workload


def test_a_short_soak_ends_without_problems(tmp_path):
    command = [sys.executable, "-m", "kvweave_bench.soak", "--minutes", "0.2"]
    command += ["--arms", "fuzzy_match", "--workers", "16", "--most-growth", "9"]
    command += ["--json", str(tmp_path / "soak.json"), "--folder", str(tmp_path / "soak")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads((tmp_path / "soak.json").read_text())["rows"]
    found = {row["metric"]: row["value"] for row in rows}
    assert found["problems"] == 0
    for name in ("exact_answers", "failed_as_told", "clients_left", "checks_of_pages"):
        assert found[name] > 0, name
    assert found["evicted_tokens"] > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("soak") / "model"
    model.save(folder, seed=3)
    oracle.load(folder)
    return folder


def greedy(prompt: list[int], count: int) -> list[int]:
    """The model's own answer."""
    import torch

    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(oracle._model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_the_oracle_finds_a_single_wrong_token_and_a_wrong_log_probability(folder):
    prompt = model.encode("what is right?")
    right = greedy(prompt, 6)
    wrong = [*right[:3], (right[3] + 1) % 300, *right[4:]]
    good, bad = oracle.judge([Claim(prompt, right), Claim(prompt, wrong)])
    assert good.wrong is None
    assert bad.wrong == 3
    assert bad.gap > oracle.CLOSE
    [scored] = oracle.judge([Claim(prompt, right, [-0.5] * 6)])
    assert scored.worst_logprob > oracle.ALIKE


def test_text_and_tokens_are_one(folder):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Ab\n ~ÀŽ" + "".join(model.SPECIAL.values())
    assert tokenizer.encode(text) == model.encode(text)
    assert tokenizer.decode(model.encode(text)) == text
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    template = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert template == model.rendered(messages)


def asked(kind: str = "prefix", **more) -> Case:
    body = {"rid": "r", "prompt": "abc", "max_tokens": 2, "stream": False, "fuzzy": False, **more}
    return Case(kind, "/v1/completions", body, ["abc"])


def replied(status: int = 200, text: str = "xy", finish: str = "length", **more) -> Reply:
    details = {"cached_tokens": 0, "moved_tokens": 0, **more.pop("details", {})}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": details}
    choice = {"index": 0, "text": text, "finish_reason": finish, "matched_stop": None}
    body = {"choices": [choice], "usage": usage, "kvweave_plan": [], **more}
    return Reply(status, {}, body)


def failed(status: int, words: str) -> Reply:
    return Reply(status, {}, {"error": {"message": words}})


@pytest.mark.parametrize(
    ("case", "reply", "words"),
    [
        (asked(), replied(), None),
        (asked(), replied(text="x"), "end by length"),
        (asked("fault:lease"), failed(500, "the model's output holds no valid numbers"), None),
        (asked(), replied(finish="abort"), "aborted"),
        (asked(), replied(usage=None), "prompt tokens"),
        (asked(), replied(details={"moved_tokens": 1}), "only exact KV"),
        (asked(), replied(details={"cached_tokens": 3}), "were reused"),
        (asked(stop=["y"]), replied(), "was shown"),
        (asked(), failed(500, "the injected by the soak"), "unexplained"),
        (asked(), failed(503, "the engine has stopped"), "unexplained"),
        (asked("fault:lease"), failed(500, "internal error: injected by the soak: lease"), None),
        (asked("fault:lease"), failed(500, "oh"), "unexplained"),
        (asked("fault:lease"), replied(), "did not fail"),
        (asked("fault:move"), failed(500, "injected by the soak: move"), "unexplained"),
        (asked(), failed(429, "no"), "429"),
        (
            asked(),
            replied(
                kvweave_plan=[
                    {"prompt": 0, "start": 1, "length": 2, "donor_start": 9, "tier": "moved"}
                ]
            ),
            "nothing may be moved",
        ),
    ],
)
def test_what_is_wrong_with_a_reply_is_seen(case, reply, words):
    problems = verdict(case, reply).problems
    if words is None:
        assert problems == []
    else:
        assert any(words in problem for problem in problems), problems


def test_what_leaks_is_seen():
    idle = {"running": 0, "waiting": 0, "used_tokens": 0, "free_tokens": 60}
    idle |= {"cached_tokens": 40, "total_tokens": 100, "evictable_tokens": 40}
    assert leaks(idle, flushed=False) == []
    assert leaks(idle, flushed=True)
    assert leaks(idle | {"used_tokens": 16}, flushed=False)
    assert leaks(idle | {"free_tokens": 59}, flushed=False)
    assert leaks(idle | {"evictable_tokens": 39}, flushed=False)


def test_memory_that_grows_is_told_from_memory_that_is_flat():
    def line(slope: float) -> list[Sample]:
        noise = (0.4, -0.3, 0.1, -0.2)
        return [Sample(at, 500 + slope * at / 3600 + noise[at % 4], 9, 9, {}) for at in range(600)]

    flat, steep = trend(line(0.0)), trend(line(100.0))
    assert abs(flat.growth) < 0.001
    assert flat.low < 0 < flat.high
    assert steep.slope == pytest.approx(100, abs=5)
    assert steep.low > 0
    assert trend([]) is None


def test_the_log_and_the_audit_are_read(tmp_path):
    outcome = variants.SoakResult("hash", problems=["doubt: a: wrong", "doubt: b: wrong"])
    log, audit = tmp_path / "log", tmp_path / "audit"
    log.write_text('{"exception": "injected by the soak"}\n{"exception": "a bug"}\n{"level": 1}\n')
    said = [{"what": "approximate", "rid": "a"}, {"what": "violation", "words": "a leak"}]
    audit.write_text("".join(json.dumps(each) + "\n" for each in said))
    variants._read_audit(audit, outcome)
    variants._read_log(log, outcome)
    assert outcome.problems == ["doubt: b: wrong", "a leak", "in the log: a bug"]


def test_a_seed_decides_what_is_asked():
    def told(seed: int) -> list[SimpleNamespace]:
        work = Workload(seed)
        return [(case.kind, case.texts) for case in (work.next() for _ in range(50))]

    assert told(1) == told(1) != told(2)
