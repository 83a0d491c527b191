"""Runners that record one prompt's KV, and play it back as if they had computed it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvweave.engine.execution.batch import ForwardBatch
from kvweave.engine.execution.runner import ModelRunner
from kvweave.kv.tensors import KVTensors


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
