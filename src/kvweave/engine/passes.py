"""A step's rows through the model: one forward pass for all, or, if that fails, halves of them.

Nobody can tell whose fault a failed pass is. Run in ever smaller groups, only those fail whose rows
fail alone: a step costs its culprits, and log2 as many passes to find them. What a failed pass
wrote lies in pages that nobody else can see, and is written again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvweave.engine.batch import ForwardBatch
from kvweave.engine.machinery import Machinery
from kvweave.engine.packing import Packer
from kvweave.engine.readout import Outcome, read_out
from kvweave.engine.request import Sequence as Sampled
from kvweave.engine.sampler import SamplingState
from kvweave.engine.scheduler import Row

logger = logging.getLogger("kvweave.engine")


class Passes:
    """Runs rows; belongs to the engine's thread."""

    def __init__(self, machinery: Machinery, packer: Packer) -> None:
        self._machinery = machinery
        self._packer = packer

    def run(
        self, rows: Sequence[Row], states: Mapping[Sampled, SamplingState], told: str = ""
    ) -> Iterator[tuple[Row, Outcome]]:
        """Every row with its outcome, in order; each has to be dealt with before the next is asked
        for, since a later group is packed only then. `told`: the error that the log explains
        already."""
        failure: Exception | None = None
        outcomes: list[Outcome] = []
        try:
            outcomes = self._together(rows, states)
        except Exception as error:
            failure = error
        if failure is None:
            yield from zip(rows, outcomes, strict=True)
            return
        if len(rows) == 1:
            yield rows[0], Outcome(error=failure, computed=False, logged=repr(failure) == told)
            return
        if repr(failure) != told:
            told = repr(failure)
            logger.error(
                "a forward pass of %d requests failed: halves are tried",
                len(rows),
                exc_info=failure,
            )
        del failure  # its traceback holds the whole batch
        half = len(rows) // 2
        yield from self.run(rows[:half], states, told)
        yield from self.run(rows[half:], states, told)

    def work(self) -> bool:
        """Whether a token that is nobody's comes through: then failures were their requests' own.

        True also while no page is free to try it with.
        """
        pool, cache = self._machinery.pool, self._machinery.cache
        try:
            if not pool.num_free:
                cache.evict(1)
            page = pool.alloc(1)
            if page is None:
                return True
            try:
                logits = self._machinery.runner.forward(_one_token(page, pool.page_size))
                return bool(logits.isfinite().all())
            finally:
                pool.drop(page)
        except Exception:
            logger.error("a forward pass of a single token failed", exc_info=True)
            return False

    def _together(
        self, rows: Sequence[Row], states: Mapping[Sampled, SamplingState]
    ) -> list[Outcome]:
        batch, wanted = self._packer.pack(rows)
        logits = self._machinery.runner.forward(batch)
        outcomes = read_out(logits, wanted, states)
        if batch.screening is not None:
            for row, outcome in enumerate(outcomes):
                outcome.chosen = batch.chosen(row)
        return outcomes


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
