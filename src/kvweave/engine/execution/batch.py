"""The batch of one forward pass: tokens, positions, block tables, and what to compute again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import SharedSpan
from kvweave.prefix.plan import BoolArray

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
    """By row: the spans that its queries read in donors' pages, where its block table has holes.
    None: no row has such spans."""

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
