"""What one forward pass computes: packed rows, as the scheduler builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvweave.kv.pool import IntArray

LongArray: TypeAlias = npt.NDArray[np.int64]


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

    @property
    def rows(self) -> int:
        return len(self.query_start) - 1

    @property
    def tokens(self) -> int:
        return len(self.token_ids)
