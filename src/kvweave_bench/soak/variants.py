"""One soaked server from start to end, by variant: its load, its samples, its problems."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvweave.errors import KvweaveError
from kvweave_bench.soak import launcher
from kvweave_bench.soak.client import Client
from kvweave_bench.soak.load import Load, idle
from kvweave_bench.soak.verdicts import NO_NUMBERS
from kvweave_bench.soak.watch import Sample, Trend, leaks, look, trend
from kvweave_bench.soak.workload import Workload

_FUZZY = (
    *("--prefix-cache-backend", "fuzzy_match", "--fuzzy-heal"),
    *("--fuzzy-share-span", "48"),  # the documents are shorter than what is shared by default
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "hash": ("--prefix-cache-backend", "hash"),
    "radix": ("--prefix-cache-backend", "radix", "--schedule-policy", "lpm"),
    "fuzzy_match": _FUZZY,
    "semantic": (*_FUZZY, "--fuzzy-provider", "semantic", "--fuzzy-semantic-embedder", "use"),
}
_FLAGS = (
    *("--port", "0", "--page-size", "16", "--max-total-tokens", "2560"),
    *("--max-running-requests", "24", "--max-queued-requests", "40"),
    *("--chunked-prefill-size", "256", "--fuzzy-self-check", "off"),
    *("--max-body-bytes", "1000000", "--log-level", "warning", "--log-format", "json"),
)
"""Small, so that eviction and preemption never pause."""
_LEAVES_WITHIN = 60.0
_MODEST = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""oneDNN keeps what it compiled for the last 1,024 shapes, and torch beside it what it made of them
for 1,024: both fill slowly, like a leak."""
MOST_FILES, MOST_THREADS, STORE_FILES = 24, 32, 16
"""Of an idle server: no connection is left, and its pools of threads are bounded; the last is what
a store adds."""
STORE_GB = 0.01
"""A few times the pool, so that the store evicts, too."""


@dataclass(slots=True)
class SoakResult:
    """What a variant ended with; `problems` empty is what a soak is for."""

    variant: str
    counts: Counter[str] = field(default_factory=Counter)
    engine: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    answer_seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    trend: Trend | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """How long, with how many clients at once, where to write, and what counts as growth."""

    model: Path
    folder: Path
    seconds: float
    workers: int
    seed: int
    most_growth: float
    every: float
    store: bool = False
    """Whether the server keeps KV on disk."""

    def flags(self, variant: str) -> tuple[str, ...]:
        """Those of the server."""
        kept = ("--kv-store", str(self.folder / "store"), "--kv-store-gb", str(STORE_GB))
        return (*_FLAGS, *VARIANTS[variant], *(kept if self.store else ()))


def run(variant: str, setting: Setting, judges: Executor, outcome: SoakResult) -> None:
    """Fills in `outcome`, also when it is interrupted."""
    audit, log = setting.folder / f"{variant}.audit.jsonl", setting.folder / f"{variant}.log"
    audit.write_text("")
    try:
        with serving(variant, setting, audit, log) as (server, url):
            asyncio.run(_under_load(outcome, setting, judges, server, Client(url)))
            server.send_signal(signal.SIGTERM)
            try:
                code = server.wait(_LEAVES_WITHIN)
                if code != 0:
                    outcome.problems.append(f"the server ended with status {code}")
            except subprocess.TimeoutExpired:
                outcome.problems.append("the server did not leave when it was told to")
    finally:
        samples = "".join(json.dumps(asdict(each)) + "\n" for each in outcome.samples)
        (setting.folder / f"{variant}.samples.jsonl").write_text(samples)
        _read_audit(audit, outcome)
        _read_log(log, outcome)


@contextmanager
def serving(
    variant: str, setting: Setting, audit: Path, log: Path
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    command = [sys.executable, "-m", launcher.__name__, "--model", str(setting.model)]
    with log.open("w") as lines:
        server = subprocess.Popen(
            [*command, *setting.flags(variant)],
            stdout=subprocess.PIPE,
            stderr=lines,
            text=True,
            start_new_session=True,  # an interrupted soak ends it in its own way
            env=_MODEST
            | os.environ
            | {launcher.AUDIT_FILE: str(audit), launcher.SEED: str(setting.seed)},
        )
        assert server.stdout is not None
        try:
            ready = server.stdout.readline()
            if " at http" not in ready:
                raise KvweaveError(f"the server did not start, see {log}")
            yield server, ready.split(" at ")[1].split("/v1")[0]
        finally:
            server.kill()
            server.communicate()


async def _under_load(
    outcome: SoakResult,
    setting: Setting,
    judges: Executor,
    server: subprocess.Popen[str],
    client: Client,
) -> None:
    load = Load(client, Workload(setting.seed), judges)
    outcome.counts, outcome.answer_seconds = load.counts, load.seconds
    began = time.monotonic()
    watching = asyncio.create_task(_watch(outcome, setting, server.pid, client, began))
    try:
        await load.run(setting.workers, setting.seconds)
    finally:
        watching.cancel()
        outcome.seconds = time.monotonic() - began
        outcome.problems += load.problems
        outcome.counts["doubtful"] = len(load.doubtful)
        outcome.trend = trend(outcome.samples)
    outcome.problems += [f"doubt: {rid}: {words}" for rid, words in load.doubtful.items()]
    await _drained(outcome, setting, server.pid, client)


async def _watch(
    outcome: SoakResult, setting: Setting, pid: int, client: Client, began: float
) -> None:
    while True:
        await asyncio.sleep(setting.every)
        reply = await client.get("/server_info")
        outcome.samples.append(look(pid, time.monotonic() - began, reply.body["engine"]))


async def _drained(outcome: SoakResult, setting: Setting, pid: int, client: Client) -> None:
    """Nothing may be left of what has been asked."""
    outcome.engine = await idle(client)
    outcome.problems += leaks(outcome.engine, flushed=False)
    for _ in range(3):  # since the gauges fail by chance, too
        flushed = await client.post("/flush_cache?timeout=10", {})
        last = (await client.get("/server_info")).body
        if not (left := leaks(last["engine"], flushed=True)):
            break
    outcome.problems += left
    if flushed.status != 200:
        outcome.problems.append(f"the idle cache could not be flushed: {flushed.body}")
    if last["live_requests"]:
        live = (await client.get("/explorer/api/overview")).body["live"]
        outcome.problems.append(f"answered for ever: {[each['rid'] for each in live]}")
    await asyncio.sleep(1.0)
    end = look(pid, outcome.seconds, last["engine"])
    if end.files > MOST_FILES + STORE_FILES * setting.store or end.threads > MOST_THREADS:
        outcome.problems.append(f"{end.files} files and {end.threads} threads are left")
    if setting.store:
        size = sum(at.stat().st_size for at in (setting.folder / "store").glob("*/pages"))
        outcome.counts["bytes stored"] = size
        if size > STORE_GB * 1e9:
            outcome.problems.append(f"the store has {size} bytes, more than its bound")
    line = outcome.trend
    if line is not None and line.low > 0 and line.growth > setting.most_growth:
        outcome.problems.append(
            f"memory grew by {line.growth:.1%} in the second half, {line.slope:.0f} MB an hour"
        )


def _read_audit(audit: Path, outcome: SoakResult) -> None:
    """What was seen from within; doubts about who became approximate on the way are settled."""
    approximate = set()
    for line in audit.read_text().splitlines():
        said = json.loads(line)
        what = said["what"]
        outcome.counts[f"audit:{what}"] += said.get("count", 1)
        if what == "violation":
            outcome.problems.append(said["words"])
        elif what == "approximate":
            approximate.add(said["rid"])
        elif what == "fault":
            outcome.counts[f"injected:{said['phase']}"] += 1
    settled = []
    for problem in outcome.problems:
        if problem.startswith("doubt: ") and problem.split(": ")[1] in approximate:
            outcome.counts["approximate since they came back"] += 1
        else:
            settled.append(problem)
    outcome.problems[:] = settled


def _read_log(log: Path, outcome: SoakResult) -> None:
    """Every error in the log is one that was injected."""
    for line in log.read_text().splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            outcome.problems.append(f"in the log: {line[:200]}")
            continue
        words = said.get("exception", launcher.WORDS)
        killed = "has died" in words and outcome.counts["injected:embedder killed"]
        if launcher.WORDS not in words and NO_NUMBERS not in words and not killed:
            outcome.problems.append(f"in the log: {said['exception'][-300:]}")
