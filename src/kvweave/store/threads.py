"""Threads that work on a store beside the engine's, and the buffers between them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

import numpy as np

from kvweave.store.pages import ByteArray

_BUFFER_BYTES = 8 << 20
_BUFFERS = 3


class Worker:
    """A thread that makes calls in order, at a lower priority than the engine's thread."""

    def __init__(self, name: str, nice: int) -> None:
        self._nice = nice
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"kvweave-store-{name}")
        self._thread.daemon = True
        self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        self._calls.put(call)

    def stop(self, seconds: float) -> bool:
        self._calls.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where threads have no priorities
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while (call := self._calls.get()) is not None:
            call()


class Buffers:
    """A fixed number of buffers for whole pages, made when they are first needed."""

    def __init__(self, page_bytes: int) -> None:
        self.pages = max(1, _BUFFER_BYTES // page_bytes)
        self._shape = (self.pages, page_bytes)
        self._free: SimpleQueue[ByteArray | None] = SimpleQueue()
        for _ in range(_BUFFERS):
            self._free.put(None)

    def take(self, seconds: float) -> ByteArray | None:
        """A buffer; None if none becomes free in time."""
        try:
            buffer = self._free.get(timeout=seconds) if seconds else self._free.get_nowait()
        except Empty:
            return None
        return np.empty(self._shape, np.uint8) if buffer is None else buffer

    def give(self, buffer: ByteArray) -> None:
        self._free.put(buffer)

    @property
    def all_free(self) -> bool:
        return self._free.qsize() == _BUFFERS
