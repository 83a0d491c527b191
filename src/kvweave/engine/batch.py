"""One step's work for the model: a packed mix of decodes and prefill chunks.

Plain arrays. Who they belong to, and what their logits are for, stays with the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(slots=True, eq=False)
class ForwardBatch:
    """T tokens of R rows (requests), row r's being [query_start[r], query_start[r + 1]).

    token_ids, positions, slots: int64 (T); positions ascend within a row and need not be adjacent.
    query_start: int32 (R + 1). pages: int32, all rows' block tables one after another, each as long
    as that row's highest position needs; page_start: int32 (R + 1) into it.
    logits_at: int64, the indices into T whose logits are wanted, ascending.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    pages: npt.NDArray[np.int32]
    page_start: npt.NDArray[np.int32]
    page_size: int
    logits_at: npt.NDArray[np.int64]

    @property
    def rows(self) -> int:
        return len(self.query_start) - 1

    @property
    def tokens(self) -> int:
        return len(self.token_ids)
