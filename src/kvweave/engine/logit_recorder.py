"""A runner in front of an engine's own: it keeps the logits of an answer, and may dictate it.

The engine knows nothing of it. A greedy sampler follows whatever logit is the largest, so an answer
is teacher_forced by raising one logit after the real ones have been noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvweave.engine.components import Runner
from kvweave.engine.execution.batch import ForwardBatch
from kvweave.errors import KvweaveError


@dataclass(frozen=True, slots=True, eq=False)
class RecordedLogits:
    """An answer as its model saw it.

    logits: float32 (T, V) on the CPU, as the model gave them; row t is what token t was chosen by.
    tokens: (T), the one that ended the answer included.
    """

    logits: torch.Tensor
    tokens: tuple[int, ...]


class LogitRecorder:
    """Stands in for an engine's runner; for one greedy request at a time."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._rows: list[torch.Tensor] = []
        self._tokens: list[int] = []
        self._dictated: tuple[int, ...] = ()

    def begin(self, teacher_forced: Sequence[int] = ()) -> None:
        """A new request follows, whose first tokens will be the `teacher_forced` ones."""
        self._rows, self._tokens, self._dictated = [], [], tuple(teacher_forced)

    def trace(self) -> RecordedLogits:
        """What was answered since `begin`."""
        return RecordedLogits(torch.stack(self._rows), tuple(self._tokens))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        logits = self.runner.forward(batch)
        if not len(batch.logits_at):  # a chunk of a prompt that goes on
            return logits
        if len(logits) != 1:
            raise KvweaveError(f"a probe watches one request, but {len(logits)} were answered")
        step = len(self._rows)
        self._rows.append(logits[0].to("cpu", copy=True))
        if step < len(self._dictated):
            logits[0, self._dictated[step]] = logits[0].max() + 1
        self._tokens.append(int(logits[0].max(dim=-1).indices))
        return logits
