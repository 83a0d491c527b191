"""Full load on one server: clients that leave, abort, send bad requests, and arrive in crowds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from kvweave_bench.soak.client import Client, LeftError, Reply
from kvweave_bench.soak.oracle import ALIKE, judge
from kvweave_bench.soak.verdicts import Verdict, verdict
from kvweave_bench.soak.workload import Case, Workload

CROWD = 64
_MOST_UNJUDGED = 128
_EVERY_CROWD, _EVERY_LULL, _LULL = 9.0, 7.0, 1.2
"""Seconds: of crowds and lulls, in which the server may heal."""


class Load:
    """Drives the load and counts; `problems` are sentences with a rid."""

    def __init__(self, client: Client, work: Workload, judges: Executor) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.doubtful: dict[str, str] = {}
        """By rid: wrong tokens of answers that may have become approximate on their way."""
        self.seconds: list[float] = []
        self._client = client
        self._work = work
        self._judges = judges
        self._over = False
        self._open = asyncio.Event()
        self._open.set()
        self._unjudged = asyncio.Semaphore(_MOST_UNJUDGED)
        self._judging: set[asyncio.Task[None]] = set()

    async def run(self, workers: int, seconds: float) -> None:
        """Until the time is over and the last answer is judged."""
        tasks = [asyncio.create_task(self._work_on()) for _ in range(workers)]
        extra = [asyncio.create_task(self._crowds()), asyncio.create_task(self._lulls())]
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._over = True
            self._open.set()
            for task in extra:
                task.cancel()
            await asyncio.gather(*tasks, *extra, return_exceptions=True)
            await asyncio.gather(*self._judging)  # raises what the judge did
        for task in tasks:
            task.result()

    async def _work_on(self) -> None:
        while not self._over:
            await self._open.wait()
            await self.ask(self._work.next())

    async def _crowds(self) -> None:
        """More at once than may wait."""
        while True:
            await asyncio.sleep(_EVERY_CROWD)
            await asyncio.gather(*(self.ask(self._work.next()) for _ in range(CROWD)))

    async def _lulls(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_LULL)
            self._open.clear()
            await asyncio.sleep(_LULL)
            self._open.set()

    async def ask(self, case: Case) -> None:
        """One request, and all that is to be said about it."""
        self.counts["requests"] += 1
        self.counts[f"asked:{case.kind}"] += 1
        try:
            with self._aborting(case):
                reply = await self._send(case)
        except LeftError:
            self.counts["left"] += 1
            return
        except (OSError, EOFError, ValueError, IndexError) as failure:
            self._object(case, f"no whole answer: {type(failure).__name__}: {failure}")
            await asyncio.sleep(0.1)  # a server that is gone answers fast
            return
        found = verdict(case, reply)
        for problem in found.problems:
            self._object(case, problem)
        self._count(case, reply, found)
        if found.claims:
            await self._unjudged.acquire()
            task = asyncio.create_task(self._judge(case, found))
            self._judging.add(task)
            task.add_done_callback(self._judging.discard)

    async def _send(self, case: Case) -> Reply:
        if case.body is None:
            return await self._client.get(case.path)
        return await self._client.post(case.path, case.body, case.leave)

    @contextmanager
    def _aborting(self, case: Case) -> Iterator[None]:
        async def abort(seconds: float) -> None:
            await asyncio.sleep(seconds)
            await self._client.post("/abort_request", {"rid": case.rid})
            self.counts["abort calls"] += 1

        task = None if case.abort is None else asyncio.create_task(abort(case.abort))
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    def _count(self, case: Case, reply: Reply, found: Verdict) -> None:
        self.counts[found.outcome] += 1
        self.counts.update({name: max(count, 0) for name, count in found.usage.items()})
        if found.outcome == "fault":
            self.counts[f"failed:{case.kind}"] += 1
        if found.outcome == "answered":
            self.seconds.append(reply.seconds)
            self._work.learn(case, found.answer)

    async def _judge(self, case: Case, found: Verdict) -> None:
        try:
            loop = asyncio.get_running_loop()
            judged = await loop.run_in_executor(self._judges, judge, found.claims)
        finally:
            self._unjudged.release()
        for claim, each in zip(found.claims, judged, strict=True):
            self.counts["answers judged"] += 1
            self.counts["approximate answers"] += not found.exact
            self.counts["ties"] += each.ties if found.exact else 0
            if not found.exact:
                self.counts["approximate answers that differ"] += each.wrong is not None
                continue
            self.counts["exact answers"] += 1
            self.counts["exact tokens"] += len(claim.answer)
            if each.worst_logprob > ALIKE:
                self._object(case, f"log probabilities are off by {each.worst_logprob:.2g}")
            if each.wrong is not None:
                words = f"token {each.wrong} is not the likeliest, by {each.gap:.3g}"
                if case.body["fuzzy"]:
                    self.doubtful[case.rid] = words
                else:
                    self._object(case, words)

    def _object(self, case: Case, words: str) -> None:
        body = case.body if isinstance(case.body, dict) else {}
        who = f"{body.get('rid', case.path)} ({case.kind}, priority {body.get('priority', 0)})"
        self.problems.append(f"{who}: {words}")


async def idle(client: Client, seconds: float = 60.0) -> dict[str, object]:
    """The engine's numbers once nothing runs or waits, or after so long."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, EOFError):
            reply = await client.get("/server_info")
            engine: dict[str, object] = reply.body["engine"]
            busy = engine["running"] or engine["waiting"] or engine["heals_waiting"]
            if not busy or time.monotonic() > deadline:
                return engine
        await asyncio.sleep(0.2)
