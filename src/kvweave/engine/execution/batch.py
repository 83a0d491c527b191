"""The batch of one forward pass, and the builder that packs rows of the scheduler into it."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvweave.engine.scheduler.scheduler import Row
from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import SharedSpan
from kvweave.prefix.plan import BoolArray

LongArray: TypeAlias = npt.NDArray[np.int64]
_Number = TypeVar("_Number", np.int32, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class RecomputeRequest:
    """Tokens of a batch whose KV was moved, and how many of them to compute again.

    The other `candidates` are pruned between layers: from there on they keep the KV of the pool.
    """

    candidates: BoolArray
    """(T)"""
    budget: IntArray
    """(R), how many of each row's candidates."""
    strategies: tuple[str | None, ...]
    """(R), by which rule (a name in fuzzy.recompute); None for rows without candidates."""
    chosen: BoolArray
    """(T), filled in by the forward pass: the candidates that it computed again."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """One forward pass over T tokens of R rows (requests), without padding.

    Row r's tokens are `[query_start[r], query_start[r + 1])`, at any ascending positions. Its block
    table is `pages[page_start[r] : page_start[r + 1]]` and covers all that its queries see:
    the KV of those that are not in this batch is in the pool already.
    """

    token_ids: LongArray
    """(T)"""
    positions: LongArray
    """(T), absolute in each row's own text."""
    slots: LongArray
    """(T), where each token's KV is written."""
    query_start: IntArray
    """(R + 1)"""
    pages: IntArray
    """All rows' block tables, one after another."""
    page_start: IntArray
    """(R + 1), into `pages`."""
    page_size: int
    logits_at: LongArray
    """Indices of the tokens (not positions) whose logits are wanted, in the order wanted."""
    recompute: RecomputeRequest | None = None
    shared: tuple[tuple[SharedSpan, ...], ...] | None = None
    """By row: what its queries see in donors' pages, where its block table has holes. None: all of
    it is in the block tables."""

    @property
    def rows(self) -> int:
        return len(self.query_start) - 1

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    def chosen(self, row: int) -> LongArray:
        """Positions of a row's candidates that the forward pass computed again."""
        if self.recompute is None:
            return self.positions[:0]
        begin, end = self.query_start[row : row + 2]
        return self.positions[begin:end][self.recompute.chosen[begin:end]]

    def only(self, kept: LongArray) -> ForwardBatch:
        """The tokens with the indices `kept`, ascending, and no others; their rows stay.

        Logits are wanted of those that are left.
        """
        wanted = self.logits_at[np.isin(self.logits_at, kept)]
        return replace(
            self,
            token_ids=self.token_ids[kept],
            positions=self.positions[kept],
            slots=self.slots[kept],
            query_start=np.searchsorted(kept, self.query_start).astype(np.int32),
            logits_at=np.searchsorted(kept, wanted),
            recompute=None,
        )


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

    def pack(self, rows: Rows[Row]) -> tuple[ForwardBatch, list[RowLogits]]:
        """Read tokens, positions and block tables of `rows` as they are now."""
        size = self._page_size
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([row.count for row in rows], out=query_start[1:])
        highest = [row.sequence.last_position(row.count) for row in rows]
        page_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([position // size + 1 for position in highest], out=page_start[1:])
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
            shared=_shared(rows, highest),
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
    sequence, lease = row.sequence, row.sequence.lease
    assert lease is not None
    table[:] = lease.pages[: len(table)]
    if row.count == 1:  # every decode: scalars are several times faster than arrays of one
        position = sequence.last_position(1)
        positions[0] = position
        token_ids[0] = sequence.tokens[position]
        slots[0] = int(table[position // size]) * size + position % size
        return
    at = sequence.next_positions(row.count)
    known = row.count - len(row.draft)
    positions[:] = at
    token_ids[:known] = sequence.tokens[at[:known]]
    token_ids[known:] = row.draft
    slots[:] = table[at // size].astype(np.int64) * size + at % size


def _shared(rows: Rows[Row], highest: list[int]) -> tuple[tuple[SharedSpan, ...], ...] | None:
    leases = [row.sequence.lease for row in rows]
    if not any(lease.shared for lease in leases if lease is not None):
        return None
    return tuple(
        tuple(run for run in lease.shared if run.end <= last) if lease is not None else ()
        for lease, last in zip(leases, highest, strict=True)
    )


def _recompute(rows: Rows[Row], query_start: IntArray) -> RecomputeRequest | None:
    """What plans leave to the forward pass to choose, if they do."""
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


def _logits(rows: Rows[Row], query_start: IntArray) -> tuple[LongArray, list[RowLogits]]:
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


_NONE = np.zeros(0, np.int32)
