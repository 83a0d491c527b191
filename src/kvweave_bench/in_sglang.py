"""Measures the plug-in in a running SGLang: `python -m kvweave_bench.in_sglang --url URL`.

One document stands behind instructions that the server has never seen. Each prompt is served with
what the plug-in lends, and computed by SGLang alone, in turns: the second time with a salt of its
own, so that nothing is found, and with the plug-in turned off. Then passages come in another order.
It needs nothing but the server, and runs in SGLang's environment.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from kvweave_bench.measure import Against, ratio_row, row
from kvweave_bench.report import Report, Row, check_writable

LIKELIEST = 1000
"""Next tokens whose probabilities are compared one by one; the rest counts as one more."""

_ROOM = 128
"""Tokens of an instruction, a question and a template, at most."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What SGLang said, and how long that took."""

    text: str
    seconds: float
    prompt_tokens: int
    cached: int
    """Tokens that were not computed, lent ones included."""
    lent: int
    next_token: dict[int, float] = field(default_factory=dict)
    """Log-probabilities of the first token, by token id."""


class Server:
    """SGLang's HTTP interface."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def get(self, path: str) -> Any:
        """The JSON that a GET answers."""
        with urllib.request.urlopen(self._url + path, timeout=600) as reply:
            return json.load(reply)

    def ask(self, prompt: str, tokens: int = 1, cold: str = "", **asked: Any) -> Answer:
        """A greedy answer; `cold` names a salt, with which nothing is found and nothing lent."""
        sampling: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": sampling, **asked}
        if cold:
            sampling["custom_params"] = {"kvweave_fuzzy": False}
            body["cache_salt"] = cold
        request = urllib.request.Request(
            f"{self._url}/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=3600) as reply:
            found = json.load(reply)
        seconds = time.perf_counter() - begin
        about = found["meta_info"]
        return Answer(
            text=found["text"],
            seconds=seconds,
            prompt_tokens=about["prompt_tokens"],
            cached=about["cached_tokens"],
            lent=(about["cached_tokens_details"] or {}).get("host", 0),
            next_token=_log_probabilities(about),
        )


def _log_probabilities(about: Mapping[str, Any]) -> dict[int, float]:
    for name in ("output_token_ids_logprobs", "output_top_logprobs"):
        if about.get(name):
            return {token: value for value, token, *_ in about[name][0]}
    return {}


def divergence(cold: Mapping[int, float], warm: Mapping[int, float]) -> float:
    """KL(cold || warm) in nats over the tokens of `cold` and, as one more, all others.

    Merging outcomes never raises a divergence, so that of the whole vocabulary is this or more.
    """
    p = [math.exp(value) for value in cold.values()]
    q = [math.exp(warm[token]) for token in cold]
    p.append(max(1 - sum(p), 1e-12))
    q.append(max(1 - sum(q), 1e-12))
    return max(0.0, sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a))


def document(number: int, sentences: int) -> str:
    """Text like no other document's."""
    chance = random.Random(number)

    def some() -> int:
        return chance.randrange(10_000)

    return " ".join(
        f"Room {some()} of hall {number} was checked by team {some()} and is in state {some()}; "
        f"its key hangs behind door {some()}."
        for _ in range(sentences)
    )


def prompt_of(instruction: str, texts: Sequence[str], question: str) -> str:
    """A prompt as retrieval builds it."""
    return f"{instruction}\nText:\n" + "\n".join(texts) + f"\n\nQuestion: {question}\nAnswer:"


def new_instruction(number: int) -> str:
    """One that no other prompt begins with."""
    return f"Case {7 * number + 3}: in {number + 2} words, from the text only, for desk {number}."


def lengths(server: Server, length: int, n: int, pairs: int, seed: int) -> list[Row]:
    """One document of about `length` tokens, taught once, behind `n` new instructions.

    The first `pairs` prompts are also computed by SGLang alone, just before.
    """
    trial = server.ask(document(seed, 20)).prompt_tokens / 20
    text = document(seed + length, max(1, round((length - _ROOM) / trial)))
    taught = server.ask(prompt_of("Read this.", [text], "Which halls?"))
    size = taught.prompt_tokens - server.ask(prompt_of("Read this.", [""], "Why?")).prompt_tokens
    warm: list[Answer] = []
    cold: list[Answer] = []
    for at in range(n):
        prompt = prompt_of(new_instruction(seed + length + at), [text], f"Which door, {at}?")
        asked: dict[str, Any] = {}
        if at < pairs:
            salt = f"{seed} {length} {at}"
            likely = {"return_logprob": True, "top_logprobs_num": LIKELIEST}
            cold.append(server.ask(prompt, cold=salt, **likely))
            asked = {"return_logprob": True, "token_ids_logprob": list(cold[-1].next_token)}
        warm.append(server.ask(prompt, **asked))
    told = [divergence(c.next_token, w.next_token) for c, w in zip(cold, warm, strict=False)]
    same = [float(c.text == w.text) for c, w in zip(cold, warm, strict=False)]
    alone = Against("cold", [answer.seconds for answer in cold])
    seconds = [answer.seconds for answer in warm[: len(cold)]]
    name, served = str(length), sum(answer.lent > 0 for answer in warm)
    return [
        row("prompt_tokens", name, [answer.prompt_tokens for answer in warm], "tokens"),
        Row(metric="served", arm=name, value=served / n, unit="share", n=n),
        row("document_share", name, [answer.lent / size for answer in warm], "share"),
        ratio_row("first_token_speedup", name, seconds, alone),
        row("first_token_ms", name, [1e3 * value for value in seconds], "ms"),
        row("first_token_ms", f"{name}, cold", [1e3 * value for value in alone.figures], "ms"),
        row("kl", name, told, "nats"),
        Row(metric="kl_mean", arm=name, value=sum(told) / len(told), unit="nats", n=len(told)),
        Row(
            metric="same_first_token",
            arm=name,
            value=sum(same) / len(same),
            unit="share",
            n=len(same),
        ),
    ]


def passages(server: Server, n: int, seed: int) -> list[Row]:
    """Four passages of one donor and of three, in another order behind a new instruction."""
    rows = []
    for donors in (1, 3):
        shares = []
        for at in range(n):
            texts = [document(seed + 10_000 * donors + 10 * at + i, 4) for i in range(4)]
            for donor in range(donors):
                prompt = prompt_of(f"Donor {donor} {at}.", texts[donor::donors], "What?")
                server.ask(prompt)
            before = _runs(server)
            # No two that follow each other in a donor: those would be one run.
            order = [texts[i] for i in ((2, 0, 3, 1) if donors == 1 else (2, 3, 0, 1))]
            server.ask(prompt_of(new_instruction(seed + 500 * donors + at), order, "Who?"))
            shares.append((_runs(server) - before) / len(texts))
        rows.append(row("passages_lent", f"{donors} donors", shares, "share"))
    return rows


def _runs(server: Server) -> int:
    return int(server.get("/server_info")["internal_states"][0]["kvweave"]["lent_runs"])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures the plug-in in a running SGLang.")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--n", type=int, default=8, help="prompts of each size")
    parser.add_argument("--pairs", type=int, help="how many of them SGLang alone computes, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    given = parser.parse_args()
    if given.json is not None:
        check_writable(given.json)
    server = Server(given.url)
    server.ask("Warm up. " * 50, 4)
    rows: list[Row] = []
    for size in given.sizes:
        rows += lengths(server, size, given.n, given.pairs or given.n, given.seed)
    rows += passages(server, min(given.n, 4), given.seed)
    about = server.get("/server_info")
    report = Report(
        bench="in-sglang", model=str(about["model_path"]), seed=given.seed, rows=tuple(rows)
    )
    wanted = ("version", "device", "attention_backend", "dtype", "tp_size", "page_size")
    report.machine["sglang"] = {name: about.get(name) for name in wanted}
    report.machine["plugin"] = about["internal_states"][0]["kvweave"]
    report.print(Console())
    if given.json is not None:
        report.write(given.json)


if __name__ == "__main__":
    main()
