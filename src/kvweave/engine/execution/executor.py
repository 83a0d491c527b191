"""Runs batches and turns their logits into row outputs: log probabilities, next tokens, errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import torch

from kvweave.engine.components import EngineComponents
from kvweave.engine.execution.batch import BatchBuilder, ForwardBatch, LongArray, RowLogits
from kvweave.engine.sampling.logits import prompt_logprobs
from kvweave.engine.sampling.sampler import SampledTokens, SamplingState, sample
from kvweave.engine.scheduler.request import Sequence
from kvweave.engine.scheduler.scheduler import Row
from kvweave.engine.types import TokenLogprob


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
    logits: torch.Tensor, wanted: Rows[RowLogits], states: Mapping[Sequence, SamplingState]
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


def _take(result: SampledTokens, rows: range, draft: Rows[int], output: RowOutput) -> None:
    """The sampled tokens up to the first that is not what the draft says.

    A draft proposes one token with certainty. Then to sample, and to go on as long as the sample
    is the proposal, is the acceptance rule of speculative sampling (Leviathan, Kalman, Matias,
    arXiv 2211.17192): what is chosen, and by which random number, is as without a draft.
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


logger = logging.getLogger("kvweave.engine")


class BatchExecutor:
    """Runs rows; belongs to the engine's thread."""

    def __init__(self, components: EngineComponents, batch_builder: BatchBuilder) -> None:
        self._components = components
        self._batch_builder = batch_builder

    def run(
        self, rows: Rows[Row], states: Mapping[Sequence, SamplingState], logged: str = ""
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
        self, rows: Rows[Row], states: Mapping[Sequence, SamplingState]
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
