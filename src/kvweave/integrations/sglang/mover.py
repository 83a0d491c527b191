"""Copies donors' KV into a request's slots within SGLang's pool, in the right stream order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from kvweave.kv.layout import LayerLayout
from kvweave.kv.relocation import MoveRun, TensorMover, relocate
from kvweave.kv.tensors import KVTensors

_AT_ONCE = 4096


class SlotRun(NamedTuple):
    """Tokens that all move by the same distance.

    sources, targets: int64 (N), on the pool's device.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    delta: int


class PoolMover:
    """Moves KV within an MHATokenToKVPool.

    With the overlap scheduler, forward passes run on a stream of their own, behind the one on which
    requests are admitted. The copy belongs on that stream: there, it comes after the pass that may
    still be writing the donor's KV (or the slots' former owner's), and before the one that reads
    the copy. Without it, everything is on the current stream.
    """

    def __init__(self, pool: Any, layouts: Sequence[LayerLayout], stream: Any | None) -> None:
        self._pool = pool
        self._layouts = tuple(layouts)
        self._stream = stream
        self._device = torch.device(pool.device)
        self._native: TensorMover | None = None
        self._viewed: list[torch.Tensor] = []

    def move(self, runs: Sequence[SlotRun]) -> None:
        """Copy every run's values, and its keys turned by its delta, in every layer."""
        if self._device.type == "cpu":
            self._on_cpu(runs)
            return
        pieces = [piece for run in runs for piece in _pieces(run)]
        with self._ordered(runs), torch.inference_mode():
            for number, layout in enumerate(self._layouts, self._pool.start_layer):
                keys = self._pool.get_key_buffer(number)
                values = self._pool.get_value_buffer(number)
                assert layout.rotary is not None  # else refused at start
                for run in pieces:
                    values[run.targets] = values[run.sources]
                    keys[run.targets] = relocate(keys[run.sources], layout.rotary, run.delta)

    def _ordered(self, runs: Sequence[SlotRun]) -> Any:
        if self._stream is None:
            return nullcontext()
        device = torch.get_device_module(self._device)
        self._stream.wait_stream(device.current_stream())  # the slots' numbers come from there
        for run in runs:  # their memory must not be reused before the copy has read them
            run.sources.record_stream(self._stream)
            run.targets.record_stream(self._stream)
        return device.stream(self._stream)

    def _on_cpu(self, runs: Sequence[SlotRun]) -> None:
        """CPUs have no streams; the compiled kernel does it in one pass."""
        numbers = range(self._pool.start_layer, self._pool.start_layer + len(self._layouts))
        keys = [self._pool.get_key_buffer(number) for number in numbers]
        values = [self._pool.get_value_buffer(number) for number in numbers]
        if self._native is None or keys[0] is not self._viewed[0]:
            tensors = KVTensors.over(self._layouts, keys, values)
            self._native, self._viewed = TensorMover(tensors), keys
        self._native.move(
            [MoveRun(_as_slots(run.sources), _as_slots(run.targets), run.delta) for run in runs]
        )


def _pieces(run: SlotRun) -> Iterator[SlotRun]:
    """`run` in pieces whose float32 copies fit into what SGLang leaves of a device's memory."""
    sources, targets = (torch.split(slots, _AT_ONCE) for slots in run[:2])
    for some, other in zip(sources, targets, strict=True):
        yield SlotRun(some, other, run.delta)


def _as_slots(slots: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int32]]:
    return slots.numpy().astype(np.int32)
