"""Runs prompts through an engine step by step and records the time of each step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kvweave.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.types import GenerateRequest, SamplingParams, Usage
from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray
from kvweave.models.load import LoadedModel
from kvweave.prefix.lease import Span
from kvweave_bench.measure import quiet_collector


@dataclass(slots=True)
class Answer:
    """One prompt's way through the engine. Times are seconds since its batch was submitted."""

    prompt: IntArray
    token_ids: list[int] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    plan: tuple[Span, ...] = ()
    refreshed: tuple[tuple[int, int], ...] = ()

    @property
    def first_token_seconds(self) -> float:
        return self.token_seconds[0]


class Driver:
    """One variant: an engine of its own over the shared model, driven on this thread."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        config.validate()
        self.engine = Engine(config, loaded)
        self.step_seconds: list[float] = []
        """Of the last `serve`, one per step."""
        self.peak_pages = 0
        """Most pages that the last `serve` held at once, without those that could be evicted."""
        self._ids = itertools.count()

    def serve(
        self,
        prompts: Sequence[IntArray],
        *,
        max_tokens: int = 1,
        fuzzy: bool = True,
        salt: str | None = None,
        session: str | None = None,
        ignore_eos: bool = True,
    ) -> list[Answer]:
        """Submit all prompts at once and run until the last greedy answer ended; answers in order.

        Raises KvweaveError if the engine ended an answer with an error.
        """
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)
        answers: dict[str, Answer] = {}
        requests = []
        for prompt in prompts:
            rid = f"bench-{next(self._ids)}"
            answers[rid] = Answer(prompt)
            ids = tuple(prompt.tolist())
            requests.append(
                GenerateRequest(
                    rid=rid,
                    prompt_ids=ids,
                    sampling=sampling,
                    fuzzy=fuzzy,
                    cache_salt=salt,
                    session=session,
                )
            )
        with quiet_collector():
            self._run(requests, answers)
        return list(answers.values())

    def _run(self, requests: list[GenerateRequest], answers: dict[str, Answer]) -> None:
        self.step_seconds, self.peak_pages = [], 0
        start = before = time.perf_counter()
        for request in requests:
            self.engine.add(request)
        unfinished = len(requests)
        while unfinished:
            deltas = self.engine.step()
            now = time.perf_counter()
            self.step_seconds.append(now - before)
            before = now
            self.peak_pages = max(self.peak_pages, self._held_pages())
            for delta in deltas:
                answer = answers[delta.rid]
                if delta.error is not None:
                    raise KvweaveError(f"the engine gave up on a prompt: {delta.error}")
                answer.token_ids += delta.token_ids
                answer.token_seconds += [now - start] * len(delta.token_ids)
                answer.usage = delta.usage
                answer.plan = delta.plan or answer.plan
                answer.refreshed = delta.refreshed or answer.refreshed
                unfinished -= delta.finish_reason is not None

    def _held_pages(self) -> int:
        pool, cache = self.engine.components.pool, self.engine.cache
        return pool.num_pages - pool.num_free - cache.evictable_pages


def per_token(answer: Answer) -> float:
    """Median seconds between two tokens, the first left out: it belongs to the prompt."""
    return float(np.median([after - before for before, after in pairwise(answer.token_seconds)]))
