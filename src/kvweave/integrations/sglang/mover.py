"""Copies donors' KV into a request's slots within SGLang's pool, in the right stream order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from kvweave.integrations.sglang.layers import KeyRotation
from kvweave.kv.relocation import turned

_AT_ONCE = 4096
"""Tokens whose float32 copies fit into what SGLang leaves of a device's memory."""


class SlotRun(NamedTuple):
    """Tokens that follow each other, in a donor and in a recipient.

    sources, targets: their slots, int64 (N), on the pool's device. donor_start, start: the first
    one's position in each.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    donor_start: int
    start: int


class PoolMover:
    """Moves KV within an MHATokenToKVPool.

    With the overlap scheduler, forward passes run on a stream of their own, behind the one on which
    requests are admitted. The copy belongs on that stream: there, it comes after the pass that may
    still be writing the donor's KV (or the slots' former owner's), and before the one that reads
    the copy. Without it, everything is on the current stream.
    """

    def __init__(self, pool: Any, rotations: Sequence[KeyRotation], stream: Any | None) -> None:
        self._pool = pool
        self._rotations = tuple(rotations)
        self._device = torch.device(pool.device)
        self._stream = None if self._device.type == "cpu" else stream  # CPUs have no streams

    def move(self, runs: Sequence[SlotRun]) -> None:
        """Copy every run's values, and its keys turned to their positions, in every layer."""
        with self._ordered(runs), torch.inference_mode():
            every = (
                torch.cat([run.sources for run in runs]),
                torch.cat([run.targets for run in runs]),
                torch.cat([self._positions(run.donor_start, run) for run in runs]),
                torch.cat([self._positions(run.start, run) for run in runs]),
            )
            for piece in zip(*(torch.split(of, _AT_ONCE) for of in every), strict=True):
                self._move(*piece)

    def _positions(self, start: int, run: SlotRun) -> torch.Tensor:
        return torch.arange(start, start + len(run.sources), device=self._device)

    def _move(
        self,
        sources: torch.Tensor,
        targets: torch.Tensor,
        donor_positions: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        tables = {rotation.table for rotation in self._rotations if rotation.table is not None}
        turns = {table: table.between(donor_positions, positions) for table in tables}
        for number, (rotary, table) in enumerate(self._rotations, self._pool.start_layer):
            keys = self._pool.get_key_buffer(number)
            values = self._pool.get_value_buffer(number)
            values[targets] = values[sources]
            lent = keys[sources]
            keys[targets] = lent if table is None else turned(lent, rotary, *turns[table])

    def _ordered(self, runs: Sequence[SlotRun]) -> Any:
        if self._stream is None:
            return nullcontext()
        device = torch.get_device_module(self._device)
        self._stream.wait_stream(device.current_stream())  # the slots' numbers come from there
        for run in runs:  # their memory must not be reused before the copy has read them
            run.sources.record_stream(self._stream)
            run.targets.record_stream(self._stream)
        return device.stream(self._stream)
