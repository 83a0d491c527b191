"""One forward pass of the engine: packs the step's rows, runs them, and reads out each row.

Also names the components that an engine is built of: their factory loads the models' code for
seconds, and is imported only where it is used.
"""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvweave.engine.attention.base import ForwardBatch, LongArray, RecomputeRequest
from kvweave.engine.execution.threads import StepThreads
from kvweave.engine.sampling.logits import prompt_logprobs
from kvweave.engine.sampling.sampler import SampledTokens, SamplingState, sample
from kvweave.engine.scheduler.request import Sequence
from kvweave.engine.scheduler.scheduler import Row
from kvweave.engine.types import TokenLogprob
from kvweave.kv.pool import IntArray, PagePool
from kvweave.prefix.contract import PrefixCache
from kvweave.prefix.events import EventSink
from kvweave.prefix.lease import Lease, SharedSpan
from kvweave.store.offloader import Offloader

logger = logging.getLogger("kvweave.engine")

_Number = TypeVar("_Number", np.int32, np.int64)
_NONE = np.zeros(0, np.int32)


class Runner(Protocol):
    """Computes a batch; its KV lands in the batch's slots."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 (len(batch.logits_at), vocab_size)."""
        ...


Interruptible: TypeAlias = Callable[[Callable[[], bool]], AbstractContextManager[None]]
"""Within the block, forward passes raise ForwardInterruptedError once the function returns True."""


def _uninterruptible(wanted: Callable[[], bool]) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class EngineComponents:
    """Everything below the scheduler; `factory.build_components` makes the real one."""

    pool: PagePool
    cache: PrefixCache
    runner: Runner
    events: EventSink | None = None
    """Where the cache's events go; the cache must collect them."""
    interruptible: Interruptible = _uninterruptible
    store: Offloader | None = None
    """Keeps the cache's KV on disk."""
    threads: StepThreads | None = None
    """None: steps do not run on the CPU."""


# From rows to a batch.


class _Buffer(Generic[_Number]):
    """An array that grows when asked for more than it has; its contents are not kept."""

    def __init__(self, dtype: type[_Number]) -> None:
        self._array: npt.NDArray[_Number] = np.empty(256, dtype)

    def take(self, size: int) -> npt.NDArray[_Number]:
        if size > len(self._array):
            self._array = np.empty(max(size, 2 * len(self._array)), self._array.dtype)
        return self._array[:size]


@dataclass(frozen=True, slots=True)
class RowLogits:
    """Which of a forward pass's logits belong to one row.

    Logits `[first, first + len(scored))` predict the prompt tokens at the positions `scored` + 1;
    the logits behind them, if a token is to be sampled, are those it is sampled from; and behind
    these are, for each token of the row's draft, those of the token after it.
    """

    row: Row
    first: int
    scored: IntArray

    @property
    def sampled(self) -> int | None:
        return self.first + len(self.scored) if _samples(self.row) else None


class BatchBuilder:
    """One per engine. The arrays of a batch are valid until the next `pack`."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._token_ids = _Buffer(np.int64)
        self._positions = _Buffer(np.int64)
        self._slots = _Buffer(np.int64)
        self._pages = _Buffer(np.int32)

    def pack(self, rows: abc.Sequence[Row]) -> tuple[ForwardBatch, list[RowLogits]]:
        """Read tokens, positions and block tables of `rows` as they are now."""
        size = self._page_size
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([row.count for row in rows], out=query_start[1:])
        highest = [row.sequence.last_position(row.count) for row in rows]
        page_start = np.zeros(len(rows) + 1, np.int32)
        leases = [_lease(row) for row in rows]
        last = [lease.own_slot(at) for lease, at in zip(leases, highest, strict=True)]
        np.cumsum([slot // size + 1 for slot in last], out=page_start[1:])
        total = int(query_start[-1])
        token_ids, positions, slots = (
            buffer.take(total) for buffer in (self._token_ids, self._positions, self._slots)
        )
        pages = self._pages.take(int(page_start[-1]))
        for r, row in enumerate(rows):
            table = pages[page_start[r] : page_start[r + 1]]
            own = slice(int(query_start[r]), int(query_start[r + 1]))
            _fill(row, size, table, token_ids[own], positions[own], slots[own])
        logits_at, wanted = _logits(rows, query_start)
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_start=query_start,
            pages=pages,
            page_start=page_start,
            page_size=size,
            logits_at=logits_at,
            recompute=_recompute(rows, query_start),
            shared=_shared(leases, highest),
        )
        return batch, wanted


def _fill(
    row: Row,
    size: int,
    table: IntArray,
    token_ids: LongArray,
    positions: LongArray,
    slots: LongArray,
) -> None:
    """Write one row's block table, tokens, positions and slots in place."""
    sequence, lease = row.sequence, _lease(row)
    table[:] = lease.pages[: len(table)]
    if row.count == 1:  # every decode: scalars are several times faster than arrays of one
        position = sequence.last_position(1)
        positions[0] = position
        token_ids[0] = sequence.tokens[position]
        own = lease.own_slot(position)
        slots[0] = int(table[own // size]) * size + own % size
        return
    at = sequence.next_positions(row.count)
    known = row.count - len(row.draft)
    positions[:] = at
    token_ids[:known] = sequence.tokens[at[:known]]
    token_ids[known:] = row.draft
    places = lease.own_slots(at)
    slots[:] = table[places // size].astype(np.int64) * size + places % size


def _lease(row: Row) -> Lease:
    lease = row.sequence.lease
    assert lease is not None  # it runs
    return lease


def _shared(leases: list[Lease], highest: list[int]) -> tuple[tuple[SharedSpan, ...], ...] | None:
    if not any(lease.shared for lease in leases):
        return None
    return tuple(
        tuple(run for run in lease.shared if run.end <= last)
        for lease, last in zip(leases, highest, strict=True)
    )


def _recompute(rows: abc.Sequence[Row], query_start: IntArray) -> RecomputeRequest | None:
    """The tokens among which plans let the forward pass select; None if no plan does."""
    if all(row.sequence.plan.deferred is None for row in rows):
        return None
    candidates = np.zeros(int(query_start[-1]), np.bool_)
    budget = np.zeros(len(rows), np.int32)
    strategies: list[str | None] = [None] * len(rows)
    for r, row in enumerate(rows):
        mine, most = row.sequence.candidates(row.count)
        deferred = row.sequence.plan.deferred
        if mine is not None and deferred is not None:
            candidates[query_start[r] : query_start[r] + len(mine)] = mine
            budget[r], strategies[r] = most, deferred.strategy
    if not candidates.any():
        return None
    return RecomputeRequest(candidates, budget, tuple(strategies), np.zeros_like(candidates))


def _logits(rows: abc.Sequence[Row], query_start: IntArray) -> tuple[LongArray, list[RowLogits]]:
    """Which tokens' logits are wanted, and whose they are."""
    indices: list[int] = []
    wanted: list[RowLogits] = []
    for r, row in enumerate(rows):
        sequence = row.sequence
        scored = _NONE
        first = len(indices)
        if sequence.scores_prompt:
            at = sequence.next_positions(row.count)
            inside = np.flatnonzero((at >= sequence.scored) & (at < sequence.prompt_length - 1))
            scored = at[inside]
            indices.extend((inside + int(query_start[r])).tolist())
        if _samples(row):
            end = int(query_start[r + 1])
            indices.extend(range(end - 1 - len(row.draft), end))
        wanted.append(RowLogits(row, first, scored))
    return np.array(indices, np.int64), wanted


def _samples(row: Row) -> bool:
    return row.completes and row.sequence.length < row.sequence.limit


# From logits to the output of each row.


@dataclass(slots=True)
class RowOutput:
    """The result of one row. An `error` concerns this row only."""

    scores: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt tokens after the row's scored positions."""
    tokens: list[int] = field(default_factory=list)
    """Sampled: one, and one more for each token of the row's draft that was sampled too."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of `tokens`, if wanted."""
    chosen: LongArray | None = None
    """Positions that the forward pass chose to compute again."""
    error: Exception | None = None
    computed: bool = True
    """False: `error` is the forward pass's, and no KV is there."""
    logged: bool = False
    """The log holds the traceback of `error` already."""


def row_outputs(
    logits: torch.Tensor, wanted: abc.Sequence[RowLogits], states: Mapping[Sequence, SamplingState]
) -> list[RowOutput]:
    """Outputs by row; `logits` may be overwritten. An exception concerns the whole batch."""
    outputs = [RowOutput() for _ in wanted]
    for part, output in zip(wanted, outputs, strict=True):
        if len(part.scored):
            _score(logits, part, output)
    rows: list[int] = []
    choosing: list[SamplingState] = []
    ends: list[int] = []
    for part in wanted:
        if part.sampled is not None:
            ahead = states[part.row.sequence].ahead(part.row.draft)
            rows += range(part.sampled, part.sampled + len(ahead))
            choosing += ahead
        ends.append(len(rows))
    if rows:
        result = sample(logits[rows] if len(rows) < len(logits) else logits, choosing)
        for part, output, start, end in zip(wanted, outputs, [0, *ends], ends, strict=False):
            _take(result, range(start, end), part.row.draft, output)
    return outputs


def _take(result: SampledTokens, rows: range, draft: abc.Sequence[int], output: RowOutput) -> None:
    """The sampled tokens up to the first that differs from the draft.

    A draft proposes one token with certainty. Then to sample, and to go on as long as the sample
    is the proposal, is the acceptance rule of speculative sampling (Leviathan, Kalman, Matias,
    arXiv 2211.17192): tokens and their random numbers are those of sampling without a draft.
    """
    for row, proposed in zip_longest(rows, draft[: len(rows) - 1]):
        if row in result.errors:
            if not output.tokens:  # else the next step meets it, with the same tokens before it
                output.error = output.error or result.errors[row]
            return
        output.tokens.append(result.token_ids[row])
        logprob = result.logprobs[row]
        if logprob is not None:
            output.logprobs.append(logprob)
        if result.token_ids[row] != proposed:
            return


def _score(logits: torch.Tensor, part: RowLogits, output: RowOutput) -> None:
    sequence = part.row.sequence
    count = sequence.group.request.sampling.prompt_logprobs or 0
    following = sequence.tokens[part.scored + 1].tolist()
    rows = logits[part.first : part.first + len(following)]
    try:
        output.scores = prompt_logprobs(rows, following, count)
    except Exception as error:
        output.error = error


class BatchExecutor:
    """Runs rows; belongs to the engine's thread."""

    def __init__(self, components: EngineComponents, batch_builder: BatchBuilder) -> None:
        self._components = components
        self._batch_builder = batch_builder

    def run(
        self, rows: abc.Sequence[Row], states: Mapping[Sequence, SamplingState], logged: str = ""
    ) -> Iterator[tuple[Row, RowOutput]]:
        """Yield every row with its output, in order. Handle each before taking the next: a later
        group is packed only then. `logged` is the error that the log already explains."""
        failure: Exception | None = None
        outputs: list[RowOutput] = []
        try:
            outputs = self._together(rows, states)
        except Exception as error:
            failure = error
        if failure is None:
            yield from zip(rows, outputs, strict=True)
            return
        if len(rows) == 1:
            yield rows[0], RowOutput(error=failure, computed=False, logged=repr(failure) == logged)
            return
        if repr(failure) != logged:
            logged = repr(failure)
            logger.error(
                "a forward pass of %d requests failed: halves are tried",
                len(rows),
                exc_info=failure,
            )
        del failure  # its traceback holds the whole batch
        half = len(rows) // 2
        yield from self.run(rows[:half], states, logged)
        yield from self.run(rows[half:], states, logged)

    def work(self) -> bool:
        """Whether a forward pass of a dummy token works: then the failures were the requests' own.

        True also while no page is free to try it with.
        """
        pool, cache = self._components.pool, self._components.cache
        try:
            if not pool.num_free:
                cache.evict(1)
            page = pool.alloc(1)
            if page is None:
                return True
            try:
                logits = self._components.runner.forward(_one_token(page, pool.page_size))
                return bool(logits.isfinite().all())
            finally:
                pool.drop(page)
        except Exception:
            logger.error("a forward pass of a single token failed", exc_info=True)
            return False

    def _together(
        self, rows: abc.Sequence[Row], states: Mapping[Sequence, SamplingState]
    ) -> list[RowOutput]:
        batch, wanted = self._batch_builder.pack(rows)
        logits = self._components.runner.forward(batch)
        outputs = row_outputs(logits, wanted, states)
        if batch.recompute is not None:
            for row, output in enumerate(outputs):
                output.chosen = batch.chosen(row)
        return outputs


def _one_token(page: np.ndarray, page_size: int) -> ForwardBatch:
    one = np.zeros(1, np.int64)
    ends = np.array([0, 1], np.int32)
    return ForwardBatch(
        token_ids=one,
        positions=one,
        slots=page.astype(np.int64) * page_size,
        query_start=ends,
        pages=page,
        page_start=ends,
        page_size=page_size,
        logits_at=one,
    )
