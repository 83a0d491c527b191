"""Moving KV: copy values, and copy keys rotated to their new positions, in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvweave.kv.pool import IntArray
from kvweave.kv.rotary import relocate
from kvweave.kv.tensors import KVTensors


@dataclass(frozen=True, slots=True, eq=False)
class MoveRun:
    """Tokens that all move by the same distance.

    sources, targets: int32 (N), slots; no slot is both. `delta`: target position - donor position.
    `zeroed`: layers whose moved KV becomes zero instead. For ablations only: zeroed keys keep their
    share of the softmax and give no value.
    """

    sources: IntArray
    targets: IntArray
    delta: int
    zeroed: frozenset[int] = frozenset()


class KVMover(Protocol):
    """Fills recipients' slots with moved KV."""

    @property
    def refusal(self) -> str | None:
        """Why this model's KV cannot be moved, as a sentence; None if it can."""

    def move(self, runs: Sequence[MoveRun]) -> None:
        """Copy every run's KV from its sources to its targets, keys rotated by its delta."""


class TensorMover:
    """Moves KV within one engine's tensors, layer by layer."""

    def __init__(self, kv: KVTensors) -> None:
        self._kv = kv

    @property
    def refusal(self) -> str | None:
        for number, layout in enumerate(self._kv.layouts):
            if layout.rotary is None:
                why = layout.fixed_because or "they carry position in an unknown way"
                return f"this model's keys cannot be moved (layer {number}): {why}"
        return None

    @torch.inference_mode()
    def move(self, runs: Sequence[MoveRun]) -> None:
        device = self._kv.device
        slots = [
            (torch.from_numpy(run.sources).to(device), torch.from_numpy(run.targets).to(device))
            for run in runs
        ]
        for layer, layout in enumerate(self._kv.layouts):
            keys, values = self._kv.keys[layer], self._kv.values[layer]
            for run, (sources, targets) in zip(runs, slots, strict=True):
                if layer in run.zeroed:
                    keys[targets] = 0
                    values[targets] = 0
                    continue
                assert layout.rotary is not None  # refused otherwise
                keys[targets] = relocate(keys[sources], layout.rotary, run.delta)
                values[targets] = values[sources]
