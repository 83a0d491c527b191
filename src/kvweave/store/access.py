"""How loads and saves use a store: on threads, through buffers, and resting after a fault."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

import numpy as np

from kvweave.kv.pool import IntArray
from kvweave.prefix.contract import PrefixCache
from kvweave.prefix.lease import Lease
from kvweave.store.catalog import Catalog
from kvweave.store.figures import OffloadCounters, Speeds
from kvweave.store.pages import ByteArray, PageStore

log = logging.getLogger("kvweave.store")

_Result = TypeVar("_Result")

_REST_SECONDS = 60.0
"""Without use of the folder, after a fault of it."""

BUFFER_BYTES = 8 << 20
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
        self.pages = max(1, BUFFER_BYTES // page_bytes)
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


class StoreAccess:
    """A store, the threads that use it, and what happens when its folder fails."""

    def __init__(self, store: PageStore, stride: int) -> None:
        """sqlite3.Error if the catalogue can be neither read nor made anew."""
        self.store = store
        self.wake: Callable[[], None] = lambda: None
        """Called on other threads when `done` has grown."""
        self.done: deque[Callable[[], object]] = deque()
        """What other threads have finished, to go on with on the engine's."""
        self.news = threading.Event()
        self.faults = 0
        self._stride = stride
        self._resting_until = 0.0
        self._warned = False
        self._generation = 0
        self._connections: dict[str, tuple[int, Catalog]] = {}
        """By thread, each with the generation of the catalogue that it belongs to."""
        try:
            store.count = self.catalog().count()
        except sqlite3.DatabaseError:
            log.warning("the store's catalogue is damaged or of another version; it starts empty")
            self._reset()
            store.count = self.catalog().count()
        self.finder = Worker("finder", 0)
        self.reader = Worker("reader", 19)
        self.writer = Worker("writer", 10)

    @property
    def resting(self) -> bool:
        """Whether the folder is left alone for a while."""
        return time.monotonic() < self._resting_until

    def close(self) -> None:
        """Stop the threads and let go of the folder."""
        stopped = [each.stop(5.0) for each in self._workers()]
        if all(stopped):  # else a thread hangs in the file system, and still uses them
            for _, catalog in self._connections.values():
                catalog.close()
            self.store.close()

    def _workers(self) -> tuple[Worker, ...]:
        return (self.writer, self.reader, self.finder)

    def run(
        self,
        worker: Worker,
        call: Callable[[], _Result],
        then: Callable[[_Result | None], object],
    ) -> None:
        """Have a worker make the call; `then` gets its result on the engine's thread.

        After a fault the result is None.
        """

        def work() -> None:
            result = self.guarded(call)
            self.tell(lambda: then(result))

        worker.put(work)

    def guarded(self, call: Callable[[], _Result]) -> _Result | None:
        """The result of a call that uses the folder; None, and a rest, if that fails."""
        try:
            return call()
        except sqlite3.OperationalError as error:
            self._fault(error)
        except sqlite3.DatabaseError as error:
            self._fault(error)
            self.writer.put(self._start_again)
        except Exception as error:
            self._fault(error)
        return None

    def _fault(self, error: BaseException) -> None:
        self.faults += 1
        self.rest(f"{type(error).__name__}: {error}")

    def rest(self, why: str) -> None:
        self._resting_until = time.monotonic() + _REST_SECONDS
        if not self._warned:
            self._warned = True
            log.warning(
                "the KV store in %s cannot be used now (%s); requests go on without it, and it is "
                "tried again every %d s",
                self.store.folder,
                why,
                _REST_SECONDS,
            )

    def tell(self, then: Callable[[], object]) -> None:
        self.done.append(then)
        self.news.set()
        self.wake()

    def catalog(self) -> Catalog:
        """The calling thread's connection to the catalogue."""
        name = threading.current_thread().name
        generation, known = self._connections.get(name, (-1, None))
        if known is not None and generation == self._generation:
            return known
        if known is not None:
            known.close()
        generation, opened = self._generation, self.store.connect(self._stride)
        self._connections[name] = generation, opened
        return opened

    def _start_again(self) -> None:
        """On the writer's thread: the catalogue is damaged."""
        try:
            self._reset()
            self._resting_until = 0.0
        except Exception as error:
            self._fault(error)

    def _reset(self) -> None:
        own = self._connections.pop(threading.current_thread().name, None)
        if own is not None:
            own[1].close()
        self._generation += 1  # other threads open theirs again before they next use it
        self.store.clear()


class PageContent(Protocol):
    """The content of a pool's pages, as bytes."""

    @property
    def page_bytes(self) -> int: ...

    def copy_out(self, pages: IntArray, out: ByteArray | None = None) -> ByteArray: ...

    def copy_in(self, pages: IntArray, data: ByteArray) -> None: ...


@dataclass(slots=True)
class Offloading:
    """What an Offloader's loads and saves have in common."""

    access: StoreAccess
    cache: PrefixCache
    content: PageContent
    speeds: Speeds
    least: int
    """Tokens of a text worth storing, and worth reading."""
    give_back: Callable[[Lease], None]
    counters: OffloadCounters = field(default_factory=OffloadCounters)
