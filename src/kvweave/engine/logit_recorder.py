"""A runner that records the logits of an answer and can force its tokens (teacher forcing).

It wraps the engine's own runner. A greedy sampler takes the largest logit, so a token is forced by
raising its logit after the model's own logits have been recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvweave.engine.execution.batch import ForwardBatch
from kvweave.engine.execution.executor import Runner
from kvweave.errors import KvweaveError


@dataclass(frozen=True, slots=True, eq=False)
class RecordedLogits:
    """The logits and tokens of one answer.

    logits: float32 (T, V) on the CPU, as the model returned them; row t precedes token t.
    tokens: (T), including the one that ended the answer.
    """

    logits: torch.Tensor
    tokens: tuple[int, ...]


class LogitRecorder:
    """Wraps an engine's runner; records one greedy request at a time."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._rows: list[torch.Tensor] = []
        self._tokens: list[int] = []
        self._forced: tuple[int, ...] = ()

    def begin(self, teacher_forced: Sequence[int] = ()) -> None:
        """Start a new recording; the answer's first tokens will be `teacher_forced`."""
        self._rows, self._tokens, self._forced = [], [], tuple(teacher_forced)

    def trace(self) -> RecordedLogits:
        """The recording since `begin`."""
        return RecordedLogits(torch.stack(self._rows), tuple(self._tokens))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        logits = self.runner.forward(batch)
        if not len(batch.logits_at):  # a chunk of a prompt that goes on
            return logits
        if len(logits) != 1:
            raise KvweaveError(f"a logit recorder takes one request, but {len(logits)} ran")
        step = len(self._rows)
        self._rows.append(logits[0].to("cpu", copy=True))
        if step < len(self._forced):
            logits[0, self._forced[step]] = logits[0].max() + 1
        self._tokens.append(int(logits[0].max(dim=-1).indices))
        return logits
