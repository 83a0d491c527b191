"""What a cache tells the outside: blocks stored, removed, all cleared.

The fields follow vLLM's and SGLang's KV events, so that routers built for them understand ours.
Only exact pages are ever named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Pages kept: a 64-bit chained hash each, the parent's (None at a root), all their tokens."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventSink(Protocol):
    """Where an engine's events go. Called between steps, so it must neither wait nor raise."""

    @property
    def dropped(self) -> int:
        """Batches that went nowhere since start, for lack of room."""
        ...

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Take what one step changed, in order."""
        ...

    def close(self) -> None:
        """Send what was taken, then stop; twice is harmless."""
        ...
