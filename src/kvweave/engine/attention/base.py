"""The batch of one forward pass, and the interface of attention backends.

A packed batch has no padding: its T tokens belong to R rows (requests), each row's tokens at any
ascending positions. A query at position p of row r attends to positions [0, p] of r (or to the
last `window` of them), whatever their source: the KV of all of them is in the pool by the time of
the call, since each layer's fresh KV is written before its queries run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvweave.kv.pool import IntArray
from kvweave.kv.tensors import KVTensors
from kvweave.prefix.lease import BoolArray, SharedSpan

LongArray: TypeAlias = npt.NDArray[np.int64]


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
    table is `pages[page_start[r] : page_start[r + 1]]` and covers, with its `shared` spans, what
    its queries see: the KV of those that are not in this batch is in the pool already.
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
    """By row: the spans that its queries read in donors' pages; its block table does not count
    their positions. None: no row has such spans."""

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


@dataclass(slots=True)
class SharedSegments:
    """Runs of positions of some rows whose KV is used where a donor has it, not copied.

    The keys there are those of other positions: they count as turned by the segment's delta, so
    that a backend turns them, or queries the other way. On the CPU, whatever the device.
    """

    row_start: torch.Tensor
    """int32 (R + 1); row r's segments are [row_start[r], row_start[r + 1]), ascending."""
    runs: torch.Tensor
    """int64 (S, 4): begin, end (positions of the row); then where `pages` holds the first of them:
    the index of its page, and its slot counted from the start of that page."""
    pages: torch.Tensor
    """int32, all segments' pages, one after another."""
    deltas: tuple[int, ...]
    """(S), position in the row - position in the donor."""

    @classmethod
    def make(cls, rows: Sequence[Sequence[SharedSpan]]) -> SharedSegments | None:
        """Of each row's runs; None if no row has any."""
        runs = [run for row in rows for run in row]
        if not runs:
            return None
        first = np.cumsum([0, *(len(run.pages) for run in runs)])
        table = [
            (run.start, run.end, page, run.slot) for run, page in zip(runs, first, strict=False)
        ]
        return cls(
            torch.tensor(np.cumsum([0, *map(len, rows)]), dtype=torch.int32),
            torch.tensor(table, dtype=torch.int64),
            torch.from_numpy(np.concatenate([run.pages for run in runs])),
            tuple(run.delta for run in runs),
        )

    def of(self, row: int, page_size: int) -> list[tuple[int, int, torch.Tensor, int]]:
        """A row's segments: begin, end, slots int64 (end - begin), delta."""
        found = []
        for at in range(int(self.row_start[row]), int(self.row_start[row + 1])):
            begin, end, page, slot = self.runs[at].tolist()
            places = slot + torch.arange(end - begin)
            slots = self.pages[page + places // page_size].long() * page_size + places % page_size
            found.append((begin, end, slots, self.deltas[at]))
        return found


@dataclass(slots=True)
class AttentionBatch:
    """Queries and block tables of one forward pass, equal for all layers, on the model's device.

    positions: int64 (T). slots: int64 (T), where each token's own KV goes.
    query_start: int32 (R + 1); row r's tokens are [query_start[r], query_start[r + 1]).
    pages: int32, all rows' block tables, one after another; page_start: int32 (R + 1) into it.
    Position p of row r, unless it lies in one of the row's `shared` segments, is in slot
    pages[page_start[r] + o // page_size] * page_size + o % page_size, where o is p less the
    positions in those segments before it.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    pages: torch.Tensor
    page_start: torch.Tensor
    page_size: int
    rows: int
    tokens: int
    longest: int
    """The largest position in the batch, plus one."""
    shared: SharedSegments | None = None


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer's attention needs beside its tensors."""

    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """float32 (heads), contiguous: a score per head that joins the softmax without a value."""

    def weights(
        self, scores: torch.Tensor, hidden: torch.Tensor | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Softmax over the last dimension of scaled scores, float32, in plain torch.

        hidden: bool, scores that do not count. sinks: the layer's, of a shape that broadcasts.
        """
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is None:
            return scores.softmax(-1)
        total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sinks)
        return (scores - total).exp()


class AttentionBackend(Protocol):
    """Computes attention over the pool. One per engine; its buffers live as long as it does."""

    name: ClassVar[str]

    def begin(self, batch: AttentionBatch) -> None:
        """Called once per forward pass, before any layer: plan work that all layers share."""

    def attend(self, query: torch.Tensor, kv: KVTensors, call: LayerCall) -> torch.Tensor:
        """query (T, heads, key_dim), contiguous; returns (T, heads, value_dim), same type.

        Heads are grouped over KV heads: query head h reads KV head h // (heads // num_kv_heads).
        The result may be overwritten by the next call.
        """
