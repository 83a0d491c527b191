"""An engine without a model: its KV says which token, at which position, lies in which slot.

The next token is a function of all tokens that a query can see. A wrong block table, a stale or
freed page, KV at another position: each changes the answer, and most are reported by name.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvweave.config import (
    CacheConfig,
    EngineConfig,
    FuzzyConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from kvweave.engine.async_engine import AsyncEngine
from kvweave.engine.attention.base import ForwardBatch
from kvweave.engine.engine import Engine
from kvweave.engine.execution.executor import EngineComponents
from kvweave.engine.types import Completion, GenerateRequest, OutputDelta, SamplingParams
from kvweave.errors import ForwardInterruptedError, RequestError
from kvweave.kv.pool import PagePool
from kvweave.plugins import BACKENDS
from kvweave.prefix.base import create_cache
from kvweave.prefix.contract import CacheOptions, PrefixCache
from kvweave.prefix.events import EventSink
from kvweave.prefix.lease import SharedSpan

VOCABULARY = 96
EOS = 95
EXACT_BACKENDS = [name for name in BACKENDS if name != "fuzzy_match"]
SHARING_BACKENDS = [name for name in EXACT_BACKENDS if name != "none"]

_WEIGHTS = np.random.default_rng(7).integers(1, 2**63, 1 << 15, dtype=np.uint64) | np.uint64(1)


def oracle_logits(tokens: np.ndarray) -> np.ndarray:
    """float32 (VOCABULARY): what the pretended model says after `tokens`."""
    mixed = (np.asarray(tokens).astype(np.uint64) + np.uint64(1)) * _WEIGHTS[: len(tokens)]
    logits = np.random.default_rng(int(mixed.sum(dtype=np.uint64))).normal(0, 3, VOCABULARY)
    return logits.astype(np.float32)


def oracle_answer(prompt: Iterable[int], count: int) -> list[int]:
    """The greedy answer of `count` tokens that never ends early."""
    tokens = list(prompt)
    start = len(tokens)
    for _ in range(count):
        tokens.append(int(oracle_logits(np.array(tokens)).argmax()))
    return tokens[start:]


class OracleRunner:
    """Stands for a model. `violations` names what no correct engine ever asks for."""

    def __init__(self, pool: PagePool) -> None:
        slots = pool.num_pages * pool.page_size
        self.tokens = np.full(slots, -1, np.int64)
        self.positions = np.full(slots, -1, np.int64)
        self.violations: list[str] = []
        self.batches: list[int] = []
        """Tokens of every forward pass."""
        self.prefilled = 0
        self.shared = 0
        """Positions that were read in donors' pages."""
        self.before: Callable[[ForwardBatch], None] = lambda batch: None
        """A place for faults."""
        self._wanted: Callable[[], bool] = lambda: False

    @contextmanager
    def interruptible(self, wanted: Callable[[], bool]) -> Iterator[None]:
        """As the hook of real models: here between writing KV and reading it."""
        self._wanted = wanted
        try:
            yield
        finally:
            self._wanted = lambda: False

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.batches.append(batch.tokens)
        self.before(batch)
        if len(np.unique(batch.slots)) != batch.tokens:
            self.violations.append("two tokens of a batch were written to one slot")
        self.tokens[batch.slots] = batch.token_ids
        self.positions[batch.slots] = batch.positions
        if self._wanted():
            raise ForwardInterruptedError("wanted elsewhere")
        wanted = set(batch.logits_at.tolist())
        logits = {}
        for row in range(batch.rows):
            start, end = int(batch.query_start[row]), int(batch.query_start[row + 1])
            pages = batch.pages[batch.page_start[row] : batch.page_start[row + 1]]
            shared = () if batch.shared is None else batch.shared[row]
            self._look(batch, start, end, pages, shared, wanted, logits)
        rows = [logits[at] for at in batch.logits_at.tolist()]
        return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, VOCABULARY), np.float32))

    def _look(
        self,
        batch: ForwardBatch,
        start: int,
        end: int,
        pages: np.ndarray,
        shared: Iterable[SharedSpan],
        wanted: set[int],
        logits: dict[int, np.ndarray],
    ) -> None:
        size = batch.page_size
        positions = batch.positions[start:end]
        if np.any(np.diff(positions) <= 0):
            self.violations.append(f"positions do not ascend: {positions}")
        slots = (pages[:, None].astype(np.int64) * size + np.arange(size)).ravel()
        turned = np.zeros(len(slots), np.int64)
        for run in shared:  # its own pages hold the other positions without a gap
            places = run.slot + np.arange(run.end - run.start)
            read = run.pages[places // size].astype(np.int64) * size + places % size
            slots = np.insert(slots, run.start, read)
            turned = np.insert(turned, run.start, np.full(len(read), run.delta))
        if len(slots) <= positions[-1]:
            self.violations.append("a query sees positions without KV")
        elif not np.array_equal(slots[positions], batch.slots[start:end]):
            self.violations.append("a token is written elsewhere than its block table says")
        if len(slots) > positions[-1] + size:
            self.violations.append("a block table has pages that its row does not need")
        seen = slots[: int(positions[-1]) + 1]
        self.shared += int(np.count_nonzero(turned))
        held = self.positions[seen] + turned[: len(seen)]
        if not np.array_equal(held, np.arange(len(seen))):
            wrong = np.flatnonzero(held != np.arange(len(seen)))
            held = held[wrong[0]]
            self.violations.append(f"position {wrong[0]} is read from a slot that holds {held}")
        for at in range(start, end):
            if at in wanted:
                visible = self.tokens[slots[: int(batch.positions[at]) + 1]]
                logits[at] = oracle_logits(visible)

    def move(self, runs: Iterable[Any]) -> None:
        """As a KVMover: copy, and shift by the distance."""
        for run in runs:
            self.tokens[run.targets] = self.tokens[run.sources]
            self.positions[run.targets] = self.positions[run.sources] + run.delta

    fixed_because = None


class PoisonedPool(PagePool):
    """Freed pages are unreadable at once."""

    runner: OracleRunner

    def drop(self, pages: np.ndarray) -> int:
        freed = super().drop(pages)
        for page in pages:
            if self.owners(int(page)) == 0:
                start = int(page) * self.page_size
                self.runner.tokens[start : start + self.page_size] = -9
                self.runner.positions[start : start + self.page_size] = -9
        return freed


class LetterTokenizer:
    """Token n is one character; the last is a special end."""

    backend_tokenizer = None
    added_tokens_decoder = {EOS: SimpleNamespace(special=True)}
    all_special_ids = [EOS]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join("<end>" if i == EOS else chr(33 + i) for i in ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) - 33 for character in text]


def fake_model(context_length: int = 4096) -> Any:
    return SimpleNamespace(
        tokenizer=LetterTokenizer(),
        identity="oracle",
        name="oracle",
        context_length=context_length,
        eos_token_ids=frozenset({EOS}),
        vocab_size=VOCABULARY,
    )


@dataclass
class World:
    """An engine and its pretended model, with ways to run them to the end."""

    engine: Engine
    runner: OracleRunner
    answers: dict[tuple[str, int], Completion] = field(
        default_factory=lambda: defaultdict(Completion)
    )
    deltas: list[OutputDelta] = field(default_factory=list)
    peak_running: int = 0

    def step(self, check: bool = True) -> list[OutputDelta]:
        deltas = self.engine.step()
        self.peak_running = max(self.peak_running, len(self.engine.scheduler.running))
        if check:
            self.engine.check()
        for delta in deltas:
            collect(self.answers[delta.rid, delta.index], delta)
        self.deltas += deltas
        assert self.runner.violations == []
        return deltas

    def run(self, *requests: GenerateRequest, check: bool = True, limit: int = 20_000) -> None:
        for request in requests:
            self.engine.add(request)
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.step(check)
        raise AssertionError("the engine does not come to an end")

    def ids(self, rid: str, index: int = 0) -> list[int]:
        answer = self.answers[rid, index]
        assert answer.finish_reason in ("stop", "length"), answer
        return answer.token_ids

    def assert_idle(self) -> None:
        """No request owns a page; what is not free is the cache's, and can be had."""
        self.engine.check()
        snapshot = self.engine.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.used_tokens) == (0, 0, 0)
        assert snapshot.free_tokens + snapshot.cached_tokens == snapshot.total_tokens
        assert snapshot.evictable_tokens == snapshot.cached_tokens


def collect(answer: Completion, delta: OutputDelta) -> None:
    assert answer.finish_reason is None, "an answer went on after its end"
    twice = delta.prompt_logprobs is not None and answer.prompt_logprobs is not None
    assert not twice, "prompt log probabilities came twice"
    answer.extend(delta)


def make_world(
    backend: str = "radix",
    *,
    page_size: int = 4,
    pool_tokens: int = 1024,
    context_length: int = 4096,
    eviction: str = "lru",
    wait: bool = True,
    retention_share: float = 0.0,
    events: EventSink | None = None,
    fuzzy: FuzzyConfig | None = None,
    speculative: SpeculativeConfig | None = None,
    make_cache: Callable[[PagePool, CacheOptions, OracleRunner], PrefixCache] | None = None,
    **scheduler: Any,
) -> World:
    cache_config = CacheConfig(
        prefix_cache_backend=backend, page_size=page_size, max_total_tokens=pool_tokens
    )
    scheduler.setdefault("random_seed", 0)
    config = EngineConfig(
        cache=cache_config,
        fuzzy=fuzzy or FuzzyConfig(),
        scheduler=SchedulerConfig(**scheduler),
        speculative=speculative or SpeculativeConfig(),
    )
    pool = PoisonedPool(pool_tokens // page_size, page_size)
    pool.runner = runner = OracleRunner(pool)
    options = CacheOptions(
        eviction=eviction,
        retention_share=retention_share,
        events=events is not None,
        wait_for_pending=wait,
        fuzzy=config.fuzzy,
    )
    if make_cache is not None:
        cache = make_cache(pool, options, runner)
    else:
        cache = create_cache(backend, pool, options, runner)
    components = EngineComponents(pool, cache, runner, events, runner.interruptible)
    engine = Engine(config, fake_model(context_length), components)
    return World(engine, runner)


def request(
    rid: str,
    prompt: Iterable[int],
    max_tokens: int | None = 8,
    *,
    priority: int = 0,
    salt: str | None = None,
    fuzzy: bool = True,
    session: str | None = None,
    **sampling: Any,
) -> GenerateRequest:
    """Greedy, and not ended by the end token, unless told otherwise."""
    sampling.setdefault("temperature", 0.0)
    sampling.setdefault("ignore_eos", True)
    return GenerateRequest(
        rid=rid,
        prompt_ids=tuple(int(token) for token in prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        priority=priority,
        cache_salt=salt,
        fuzzy=fuzzy,
        session=session,
    )


def prompt(length: int, seed: int = 0, prefix: Iterable[int] = ()) -> list[int]:
    """Random tokens behind `prefix`, `length` in all."""
    start = list(prefix)
    rest = np.random.default_rng(seed).integers(0, VOCABULARY - 1, length - len(start))
    return start + rest.tolist()


FAMILIES = [prompt(90, seed) for seed in range(4)]


def random_request(rng: np.random.Generator, rid: str):
    family = FAMILIES[rng.integers(len(FAMILIES))]
    shared = family[: int(rng.integers(0, len(family)))]
    tokens = prompt(len(shared) + int(rng.integers(1, 12)), int(rng.integers(1000)), shared)
    sampling = {}
    if rng.random() < 0.2:
        sampling["prompt_logprobs"] = int(rng.integers(0, 3))
    if rng.random() < 0.2:
        sampling["n"] = int(rng.integers(2, 4))
    return request(
        rid,
        tokens,
        int(rng.choice([0, 1, 3, 20, 60, 200])),
        priority=int(rng.choice([0, 0, 0, 1, -1])),
        salt=str(rng.choice(["", "a"])) if rng.random() < 0.2 else None,
        **sampling,
    )


class Faults:
    """Breaks a forward pass now and then; never so often that the engine gives up."""

    def __init__(self, rng: np.random.Generator, rate: float) -> None:
        self.rng, self.rate, self.row = rng, rate, 0

    def __call__(self, batch) -> None:
        self.row = self.row + 1 if self.rng.random() < self.rate else 0
        if 0 < self.row < 4:
            raise RuntimeError("injected")


def random_life(
    world: World,
    rng: np.random.Generator,
    turns: int,
    make: Callable[[np.random.Generator, str], GenerateRequest] = random_request,
    label: str = "",
) -> dict[str, GenerateRequest]:
    """Requests come, go and are refused for some turns; then the world runs until it is idle.

    Returns the requests that were taken. One that wants more than fits goes on to where room ends.
    """
    requests: dict[str, GenerateRequest] = {}
    limits = world.engine.limits
    for turn in range(turns):
        for _ in range(int(rng.integers(0, 3))):
            new = make(rng, f"{label}{turn}-{len(requests)}")
            endless = replace(new, sampling=replace(new.sampling, max_tokens=None))
            if limits.longest(new) > limits.longest(endless):
                new = endless
            try:
                world.engine.add(new)
                requests[new.rid] = new
            except RequestError:
                world.engine.check()
        if requests and rng.random() < 0.1:
            for delta in world.engine.abort(str(rng.choice(list(requests)))):
                world.answers[delta.rid, delta.index].finish_reason = delta.finish_reason
            world.engine.check()
        world.step()
    world.runner.before = lambda batch: None
    world.run()
    world.assert_idle()
    return requests


def assert_answers(world: World, requests, faults: bool) -> None:
    assert {rid for rid, _ in world.answers} == set(requests)
    done = 0
    for (rid, index), answer in world.answers.items():
        asked = requests[rid]
        assert index < asked.sampling.n
        assert 0 <= answer.usage.cached_tokens < len(asked.prompt_ids)
        assert answer.finish_reason in ("length", "abort", "error")
        if answer.finish_reason == "error":
            assert faults
            assert "injected" in answer.error
        else:
            expected = oracle_answer(asked.prompt_ids, len(answer.token_ids))
            assert answer.token_ids == expected, (rid, index)
        if answer.finish_reason == "length":
            done += 1
            room = world.engine.limits.longest(asked) - len(asked.prompt_ids)
            assert len(answer.token_ids) == room
            if asked.sampling.prompt_logprobs is not None and index == 0:
                assert len(answer.prompt_logprobs) == len(asked.prompt_ids)
    assert done > len(world.answers) / 6


def explode(*_args, **_kwargs):
    raise RuntimeError("injected")


@asynccontextmanager
async def serving(world: World):
    engine = AsyncEngine(world.engine)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def answer_of(stream) -> Completion:
    answer = Completion()
    async for delta in stream:
        collect(answer, delta)
    return answer


async def until(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("this never came true")
