"""A runner in front of an engine's own: it keeps the logits of an answer, and may dictate it.

The engine knows nothing of it. A greedy sampler follows whatever logit is the largest, so an answer
is dictated by raising one logit after the real ones have been noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvweave.engine.batch import ForwardBatch
from kvweave.engine.machinery import Runner
from kvweave.engine.runner import ModelRunner
from kvweave.errors import KvweaveError
from kvweave.kv.tensors import KVTensors


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """An answer as its model saw it.

    logits: float32 (T, V) on the CPU, as the model gave them; row t is what token t was chosen by.
    tokens: (T), the one that ended the answer included.
    """

    logits: torch.Tensor
    tokens: tuple[int, ...]


class Probe:
    """Stands in for an engine's runner; for one greedy request at a time."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._rows: list[torch.Tensor] = []
        self._tokens: list[int] = []
        self._dictated: tuple[int, ...] = ()

    def begin(self, dictated: Sequence[int] = ()) -> None:
        """A new request follows, whose first tokens will be the `dictated` ones."""
        self._rows, self._tokens, self._dictated = [], [], tuple(dictated)

    def trace(self) -> Trace:
        """What was answered since `begin`."""
        return Trace(torch.stack(self._rows), tuple(self._tokens))

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


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """One prompt's KV, so that several engines may hold what one of them computed.

    keys, values: by layer, (N, heads, dim) in the order of positions. logits: float32 (1, V), those
    after the prompt.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    logits: torch.Tensor


class Recorder:
    """Computes one prompt from its first token on as the runner behind it does; copies its KV."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._chunks: list[Tape] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        logits = self.runner.forward(batch)
        kv = self.runner.kv
        slots = torch.from_numpy(batch.slots).to(kv.device)
        # Indexing copies: the pool's slots will soon hold somebody else's KV.
        keys, values = (tuple(layer[slots] for layer in each) for each in (kv.keys, kv.values))
        self._chunks.append(Tape(keys, values, logits.clone()))
        return logits

    def tape(self) -> Tape:
        """All that was computed."""
        layers = range(len(self.runner.kv.layouts))
        return Tape(
            tuple(torch.cat([chunk.keys[layer] for chunk in self._chunks]) for layer in layers),
            tuple(torch.cat([chunk.values[layer] for chunk in self._chunks]) for layer in layers),
            self._chunks[-1].logits,
        )


class Player:
    """Answers as the recorded prompt was answered, its KV copied into the slots it is told."""

    def __init__(self, tape: Tape, kv: KVTensors) -> None:
        self.tape = tape
        self.kv = kv

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        at = torch.from_numpy(batch.positions).to(self.kv.device)
        slots = torch.from_numpy(batch.slots).to(self.kv.device)
        for layer, (keys, values) in enumerate(zip(self.tape.keys, self.tape.values, strict=True)):
            self.kv.write(layer, slots, keys[at], values[at])
        return self.tape.logits[: len(batch.logits_at)].clone()
