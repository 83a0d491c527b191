"""The parts below the scheduler that an engine is given, from the pool to the store on disk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from kvweave.engine.execution.batch import ForwardBatch
from kvweave.engine.execution.threads import StepThreads
from kvweave.kv.pool import PagePool
from kvweave.prefix.contract import PrefixCache
from kvweave.prefix.events import EventSink
from kvweave.store.offloader import Offloader


class Runner(Protocol):
    """Computes a batch; its KV lands in the batch's slots."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 (len(batch.logits_at), vocab_size)."""
        ...


Interruptible: TypeAlias = Callable[[Callable[[], bool]], AbstractContextManager[None]]
"""Within the block, forward passes raise ForwardInterruptedError once the function returns True."""


def _uninterruptible(wanted: Callable[[], bool]) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class EngineComponents:
    """Everything below the scheduler; `factory.build_components` makes the real one."""

    pool: PagePool
    cache: PrefixCache
    runner: Runner
    events: EventSink | None = None
    """Where the cache's events go; the cache must collect them."""
    interruptible: Interruptible = _uninterruptible
    store: Offloader | None = None
    """Keeps the cache's KV on disk."""
    threads: StepThreads | None = None
    """None: the steps are no work for CPU threads."""
