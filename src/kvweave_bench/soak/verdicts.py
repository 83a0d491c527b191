"""Checks of responses: their form, their counts, and their tokens one by one."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvweave_bench.soak.client import Reply
from kvweave_bench.soak.launcher import FATAL, WORDS
from kvweave_bench.soak.model import CONTEXT, EOS_ID, encode
from kvweave_bench.soak.oracle import Claim
from kvweave_bench.soak.workload import Case

SINKS, LAST = 4, 8
"""The server's --fuzzy-sink-tokens and --fuzzy-min-suffix."""
SERVER_WORDS, NO_NUMBERS = "the server failed on this request", "no valid numbers"


@dataclass(slots=True)
class SequenceOutput:
    """One choice, put together."""

    text: str = ""
    finish: str | None = None
    matched: Any = None
    logprobs: list[float | None] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """What one reply shows. `claims` remain to be judged; `exact`: wrong ones are then errors."""

    outcome: str
    problems: list[str] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    exact: bool = True
    usage: Counter[str] = field(default_factory=Counter)
    answer: str = ""


def verdict(case: Case, reply: Reply) -> Verdict:
    """Of a reply that was read to its end."""
    error = reply.error
    if case.kind == "looking":
        # A probe through the engine waits like everyone, or hears that it cannot.
        full = case.path == "/health_generate" and reply.status == 503 and "wait" in str(error)
        fine = full or reply.status == 200 or (case.path, reply.status) == ("/flush_cache", 409)
        return Verdict("looked", [] if fine else [f"{case.path} says {reply.status}: {error}"])
    if reply.status == 429:
        return Verdict("queue full", _full_queue(reply, error))
    if case.refused:
        said = error is not None and len(str(error.get("message"))) > 8
        fine = reply.status in case.refused and said
        return Verdict("refused", [] if fine else [f"{reply.status} {error} for {case.refused}"])
    if error is not None:
        return Verdict("fault", _fault(case, reply, error))
    if reply.status != 200:
        return Verdict("fault", [f"status {reply.status} without an error"])
    found = _judged_by_form(case, reply)
    if case.kind.startswith("fault:") and case.kind[6:] in FATAL:
        found.problems.append(f"{case.kind} did not fail")
    return found


def _full_queue(reply: Reply, error: dict[str, Any] | None) -> list[str]:
    said = error is not None and error.get("code") == "queue_full" and "try again" in str(error)
    return [] if said and reply.headers.get("retry-after", "").isdecimal() else [f"429: {error}"]


def _fault(case: Case, reply: Reply, error: dict[str, Any]) -> list[str]:
    """A failure is explained by what the request had asked for, and says so."""
    words = str(error.get("message"))
    asked = case.kind.startswith("fault:") and case.kind[6:] in FATAL
    told = WORDS in words or SERVER_WORDS in words or NO_NUMBERS in words
    status = reply.status == 500 or (bool(reply.events) and reply.done)
    return [] if asked and told and status else [f"unexplained: {reply.status} {words}"]


def _judged_by_form(case: Case, reply: Reply) -> Verdict:
    whole = _whole(case, reply)
    usage, plan = whole["usage"] or {}, whole["plan"]
    found = Verdict("answered")
    details = usage.get("prompt_tokens_details") or {}
    for name in ("cached_tokens", "moved_tokens", "paraphrase_tokens", "refreshed_tokens"):
        found.usage[name] = details.get(name, 0)
    found.usage["prompt_tokens"] = usage.get("prompt_tokens", -1)
    found.usage["completion_tokens"] = usage.get("completion_tokens", 0)
    prompts = [encode(text) for text in case.texts]
    found.problems += _wrong_counts(case, prompts, found.usage)
    found.problems += _wrong_plan(prompts, plan)
    if reply.events and not reply.done:
        found.problems.append("the stream broke off")
    count = len(prompts) * case.body.get("n", 1)
    answers = whole["answers"]
    if sorted(answers) != list(range(count)):
        found.problems.append(f"{sorted(answers)} are not {count} answers")
        return found
    found.answer = answers[0].text
    found.exact = all(span["tier"] == "exact" for span in plan) and not (
        found.usage["moved_tokens"] or found.usage["paraphrase_tokens"]
    )
    for number, answer in answers.items():
        prompt = case.texts[number // case.body.get("n", 1)]
        _add_claim(case, prompt, answer, found)
    if not case.body["fuzzy"] and not found.exact:
        found.problems.append("approximate, although only exact KV was asked for")
    return found


def _whole(case: Case, reply: Reply) -> dict[str, Any]:
    """Choices, usage and plan, whether they came as one object or as events."""
    objects = reply.events if reply.events else [reply.body]
    answers: dict[int, SequenceOutput] = {}
    usage: dict[str, Any] | None = None
    plan: list[dict[str, Any]] = []
    for each in objects:
        usage = each.get("usage") or usage
        plan += each.get("kvweave_plan") or []
        for choice in each["choices"]:
            answer = answers.setdefault(choice["index"], SequenceOutput())
            said = choice.get("text")
            if said is None:
                said = (choice.get("message") or choice["delta"]).get("content")
            answer.text += said or ""
            answer.finish = choice["finish_reason"] or answer.finish
            answer.matched = choice.get("matched_stop", answer.matched)
            if choice.get("logprobs"):
                answer.logprobs += choice["logprobs"]["token_logprobs"]
    return {"answers": answers, "usage": usage, "plan": plan}


def _wrong_counts(case: Case, prompts: list[list[int]], usage: Counter[str]) -> list[str]:
    length = sum(map(len, prompts))
    reused = sum(usage[tier] for tier in ("cached_tokens", "moved_tokens", "paraphrase_tokens"))
    wrong = []
    if usage["prompt_tokens"] != length:
        wrong.append(f"{usage['prompt_tokens']} prompt tokens were {length}")
    if not 0 <= reused <= length - len(prompts):
        wrong.append(f"{reused} of {length} tokens were reused")
    most = case.body["max_tokens"] * len(prompts) * case.body.get("n", 1)
    if usage["completion_tokens"] > most:
        wrong.append(f"{usage['completion_tokens']} tokens where {most} were allowed")
    return wrong


def _wrong_plan(prompts: list[list[int]], plan: list[dict[str, Any]]) -> list[str]:
    """Spans ascend and keep off the ends. Usage counts the first admission and the plan is of the
    latest, so the two may differ under pressure."""
    wrong = []
    for at, prompt in enumerate(prompts):
        behind: dict[int, int] = {}
        for span in (span for span in plan if span["prompt"] == at):
            answer = span.get("answer", 0)  # one whose plan differs has spans of its own
            start, end = span["start"], span["start"] + span["length"]
            if start < behind.get(answer, 0) or span["length"] < 1 or span["donor_start"] < 0:
                wrong.append(f"span {span} overlaps the one before")
            behind[answer] = end
            if span["tier"] == "exact":
                continue
            if start < SINKS or span["donor_start"] < SINKS or end > len(prompt) - LAST:
                wrong.append(f"span {span} reaches where nothing may be moved")
    return wrong


def _add_claim(case: Case, prompt: str, answer: SequenceOutput, found: Verdict) -> None:
    """Check how the answer ends, and note what is to be judged."""
    text = answer.text
    if case.body.get("echo"):
        if not text.startswith(prompt):
            found.problems.append("the echo is not the prompt")
        text = text[len(prompt) :]
    tokens = encode(text)
    if answer.finish == "abort":
        if case.abort is None:
            found.problems.append("aborted, and nobody had wanted that")
        found.outcome = "aborted"
    elif answer.finish == "length":
        full = len(prompt) + len(tokens) >= CONTEXT
        if len(tokens) != case.body["max_tokens"] and not full:
            found.problems.append(f"{len(tokens)} tokens end by length")
    elif answer.finish == "stop" and answer.matched == EOS_ID:
        tokens.append(EOS_ID)
    elif answer.finish == "stop" and answer.matched in case.body.get("stop", ()):
        tokens += encode(answer.matched)
    else:
        found.problems.append(f"ended by {answer.finish}, {answer.matched!r}")
    for stop in case.body.get("stop", ()):
        if re.search(re.escape(stop), text):
            found.problems.append(f"the stop string {stop!r} was shown")
    if tokens:
        said = [value for value in answer.logprobs if value is not None]
        echoed = bool(case.body.get("echo"))
        found.claims.append(Claim(encode(prompt), tokens, said, from_start=echoed))
