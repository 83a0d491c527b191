"""Compares routers: `python -m kvweave_bench.routing`, with Ray and sglang-router installed.

Two replicas of one engine stand behind each router in turn. Six conversations of five turns run at
once; then the six documents that they were about come back behind another instruction. What counts
is how much of the prompts was served from a cache, at which balance between the replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from rich.console import Console

from kvweave.cluster.app import running_engines
from kvweave.config import CacheConfig, ClusterConfig, EngineConfig, FuzzyConfig, ModelConfig
from kvweave.engine.types import GenerateRequest, SamplingParams, Usage
from kvweave.models import packaged
from kvweave.prefix.lease import Reuse
from kvweave_bench.measure import row
from kvweave_bench.report import Report, Row

GROUPS, TURNS, REPLICAS = 6, 5, 2
_POOL_TOKENS = 16_384
_RAY_PREFIX_AWARE = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:"
    "PrefixCacheAffinityRouter"  # its public name wants pyarrow as well
)


class RoundRobin(RequestRouter):  # type: ignore[misc]  # untyped where Ray is not installed
    """Each replica in turn."""

    def initialize_state(self) -> None:
        self._turns = itertools.count()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        ordered = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        at = next(self._turns) % len(ordered)
        return [[replica] for replica in ordered[at:] + ordered[:at]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest(GenerateRequest):
    """Also says its text, by which Ray's own router goes."""

    prompt: str = ""


RAY_VARIANTS = {
    "round-robin": RequestRouterConfig(request_router_class="kvweave_bench.routing:RoundRobin"),
    "power-of-two": RequestRouterConfig(),
    "ray-prefix-aware": RequestRouterConfig(request_router_class=_RAY_PREFIX_AWARE),
    "kvweave": RequestRouterConfig(request_router_class="kvweave.cluster.app:OverlapRouter"),
}
SGLANG_VARIANT = "sglang-cache-aware"

Ask = Callable[[str], Awaitable[Usage]]


@dataclass(frozen=True, slots=True)
class Behind:
    """Two replicas behind some router: how to ask, and what each was given (prompt tokens)."""

    ask: Ask
    given: Callable[[], Awaitable[list[int]]]


@dataclass(slots=True)
class Tally:
    """Prompt tokens of one phase, and how many of them were served from a cache."""

    prompts: int = 0
    asked: int = 0
    reused: int = 0

    def add(self, usage: Usage) -> None:
        self.prompts += 1
        self.asked += usage.prompt_tokens
        self.reused += usage.cached_tokens + usage.moved_tokens


class Workload:
    """Texts, the same for all variants."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        letters = "bcdfghklmnprstvz"
        self._words = [
            "".join(self._random.choice(list(letters + "aeiou"), 4)) for _ in range(2000)
        ]
        self.system = f"You answer questions about the text below. {self._say(20)}\n"
        self.documents = [self._say(150) for _ in range(GROUPS)]
        self.turns = [[self._say(16) for _ in range(TURNS)] for _ in range(GROUPS)]
        self.instructions = [f"Sum up, in one line. {self._say(12 + g)}\n" for g in range(GROUPS)]

    def conversation(self, group: int) -> list[str]:
        """The prompt of each turn; every one begins with the one before, and an answer to it."""
        text, prompts = self.system + self.documents[group], []
        for turn in self.turns[group]:
            text += f"\nQuestion: {turn}?\nAnswer:"
            prompts.append(text)
            text += f" {turn}."
        return prompts

    def moved(self, group: int) -> str:
        """The conversation's document behind another instruction."""
        return f"{self.instructions[group]}{self.documents[group]}\nSummary:"

    def _say(self, words: int) -> str:
        return " ".join(self._random.choice(self._words, words))


async def drive(behind: Behind, work: Workload, seed: int) -> tuple[Tally, Tally, float]:
    """Conversations and moved documents; the balance is the least given over the most."""
    turns, moved = Tally(), Tally()

    async def converse(group: int) -> None:
        for prompt in work.conversation(group):
            turns.add(await behind.ask(prompt))

    async def come_back(group: int) -> None:
        moved.add(await behind.ask(work.moved(group)))

    random = np.random.default_rng(seed)
    await asyncio.gather(*map(converse, random.permutation(GROUPS).tolist()))
    # In another order, since round robin would otherwise always be right or always wrong.
    await asyncio.gather(*map(come_back, random.permutation(GROUPS).tolist()))
    given = await behind.given()
    return turns, moved, min(given) / max(given)


@contextmanager
def behind_ray(config: EngineConfig, router: RequestRouterConfig) -> Iterator[Behind]:
    cluster = ClusterConfig(replicas=REPLICAS)
    with running_engines(config, cluster, router) as (engine, facts):
        sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        names = itertools.count()

        async def ask(text: str) -> Usage:
            ids = tuple(facts.tokenizer(text)["input_ids"])
            request = TextRequest(
                rid=str(next(names)), prompt_ids=ids, sampling=sampling, prompt=text
            )
            usage = Usage()
            async for delta in engine.generate(request):
                usage = delta.usage
            return usage

        async def given() -> list[int]:
            return [each.prompt_tokens for each in await engine.snapshots()]

        yield Behind(ask, given)


@contextmanager
def behind_sglang(config: EngineConfig) -> Iterator[Behind]:
    """`kvweave serve` twice, and sglang-router before them."""
    ports = [_free_port() for _ in range(REPLICAS + 2)]
    urls = [f"http://127.0.0.1:{port}" for port in ports[2:]]
    flags = ["--max-total-tokens", str(_POOL_TOKENS), "--fuzzy-self-check", "off"]
    flags += ["--prefix-cache-backend", config.cache.prefix_cache_backend]
    flags += ["--model", config.model.model] if config.model.model else []
    serve = [sys.executable, "-m", "kvweave.cli.main", "serve", *flags, "--port"]
    route = [sys.executable, "-m", "sglang_router.launch_router", "--policy", "cache_aware"]
    route += ["--host", "127.0.0.1", "--port", str(ports[0]), "--prometheus-port", str(ports[1])]
    commands = [[*serve, str(port)] for port in ports[2:]] + [[*route, "--worker-urls", *urls]]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen(command, env=one_thread, **quiet) for command in commands]
    try:
        base = f"http://127.0.0.1:{ports[0]}"
        _wait_for(f"{base}/readiness", lambda body: body.get("healthy_workers") == REPLICAS)
        yield Behind(_http_ask(base), lambda: _http_given(urls))
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def _http_ask(base: str) -> Ask:
    model = httpx.get(f"{base}/v1/models").json()["data"][0]["id"]

    async def ask(text: str) -> Usage:
        body = {"model": model, "prompt": text, "max_tokens": 4, "temperature": 0}
        async with httpx.AsyncClient(timeout=120) as client:
            reply = await client.post(f"{base}/v1/completions", json=body)
        usage = reply.raise_for_status().json()["usage"]
        details = usage["prompt_tokens_details"]
        return Usage(
            prompt_tokens=usage["prompt_tokens"],
            reuse=Reuse(exact=details["cached_tokens"], moved=details["moved_tokens"]),
        )

    return ask


async def _http_given(urls: list[str]) -> list[int]:
    async with httpx.AsyncClient() as client:
        replies = [await client.get(f"{url}/server_info") for url in urls]
    return [reply.json()["engine"]["prompt_tokens"] for reply in replies]


def _wait_for(url: str, ready: Callable[[dict[str, Any]], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if ready(httpx.get(url).json()):
                return
        except (httpx.HTTPError, ValueError):
            pass
        time.sleep(0.2)
    raise TimeoutError(f"{url} is not ready after {seconds:g} seconds")


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def measure(config: EngineConfig, variant: str, seed: int) -> dict[str, float]:
    """One run of one variant, with engines of its own."""
    setting = (
        behind_sglang(config)
        if variant == SGLANG_VARIANT
        else behind_ray(config, RAY_VARIANTS[variant])
    )
    with setting as behind:
        turns, moved, balance = asyncio.run(drive(behind, Workload(seed), seed))
    return {
        "turns_reused_share": turns.reused / turns.asked,
        "moved_reused_share": moved.reused / moved.asked,
        "balance": balance,
    }


def rows_of(variant: str, runs: list[dict[str, float]]) -> list[Row]:
    """Medians and spread over the runs."""
    return [row(name, variant, [run[name] for run in runs], "share") for name in runs[0]]


def main() -> None:
    """Run all variants, print and write the report."""
    variants = [*RAY_VARIANTS, SGLANG_VARIANT]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=variants, default=variants)
    parser.add_argument("--model", help="the packaged one without it")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # Ray turns everybody's log on
    config = EngineConfig(
        model=ModelConfig(model=given.model, device="cpu"),
        cache=CacheConfig(prefix_cache_backend="fuzzy_match", max_total_tokens=_POOL_TOKENS),
        fuzzy=FuzzyConfig(self_check="off"),  # what is reused counts here, not what is said
    )
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in given.arms}
    for seed in given.seeds:
        for variant in given.arms:
            runs[variant].append(measure(config, variant, seed))
            print(
                variant, seed, {name: round(value, 3) for name, value in runs[variant][-1].items()}
            )
    rows = [each for variant in given.arms for each in rows_of(variant, runs[variant])]
    model = given.model or packaged.NAME
    report = Report(bench="routing", model=model, seed=given.seeds[0], rows=tuple(rows))
    report.print(Console())
    if given.json is not None:
        report.write(given.json)


if __name__ == "__main__":
    main()
