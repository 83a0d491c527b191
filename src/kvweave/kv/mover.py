"""Moving KV: copy values, and copy keys rotated to their new positions, in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvweave.kv.pool import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class MoveRun:
    """Tokens that all move by the same distance.

    sources, targets: int32 (N), slots; no slot is both. `delta`: target position - donor position.
    """

    sources: IntArray
    targets: IntArray
    delta: int


class KVMover(Protocol):
    """Fills recipients' slots with moved KV."""

    @property
    def refusal(self) -> str | None:
        """Why this model's KV cannot be moved, as a sentence; None if it can."""

    def move(self, runs: Sequence[MoveRun]) -> None:
        """Copy every run's KV from its sources to its targets, keys rotated by its delta."""
