"""Writes the KV of finished requests to the store, and reads it back for requests that wait.

The engine's thread copies KV between pages and buffers, a few milliseconds between two steps, and
holds no page in between. Threads of the offloader's own look up, read and write; the engine never
waits for them, and a request waits for no longer than computing would take.

    request arrives   expect    a thread looks its prefix and its moved text up in the catalogue
    while it waits    pump      a thread reads pages to buffers; the engine copies them to pages of
                                its cache and publishes them, as if it had just computed them
    request has ended offer     a thread looks up what is new; the engine copies it to buffers; a
                                thread writes these
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from kvweave.kv.pool import IntArray
from kvweave.prefix.contract import PrefixCache
from kvweave.prefix.lease import Lease, Namespace, RequestView
from kvweave.store.catalog import Catalog, StoredPath
from kvweave.store.pages import ByteArray, PageFormat, PageStore
from kvweave.store.threads import Buffers, Worker

log = logging.getLogger("kvweave.store")

LEAST_TOKENS = 64
"""Fewer tokens are neither stored nor read: finding them costs about what computing them does."""
_LONGEST_LOOKUP, _LONGEST_WAIT = 1.0, 30.0
"""A request waits no longer to know what is stored, and for what is."""
_SEARCH_SECONDS = 0.1
"""For moved text; what is found by then is read."""
_LATE_IN_A_ROW = 4
"""Requests that waited in vain, after which the folder counts as faulty."""
_REST_SECONDS = 60.0
"""Without use of the folder, after a fault of it."""
_MOST_SAVES = 1024
"""Requests whose KV may wait to be written; the oldest are dropped."""
_OLD_SHARE = 0.8
"""Of the past, in the measured speeds."""

_Result = TypeVar("_Result")


class PageContent(Protocol):
    """The content of a pool's pages, as bytes."""

    @property
    def page_bytes(self) -> int: ...

    def copy_out(self, pages: IntArray, out: ByteArray | None = None) -> ByteArray: ...

    def copy_in(self, pages: IntArray, data: ByteArray) -> None: ...


@dataclass(slots=True, eq=False)
class _Load:
    """What a waiting request can use of the store."""

    view: RequestView
    deadline: float
    paths: deque[StoredPath] | None = None
    """Still to be read; None: not known yet."""


@dataclass(slots=True, eq=False)
class _Reading:
    """A path on its way from the store; `at` pages are in the cache."""

    load: _Load
    path: StoredPath
    at: int
    cancelled: bool = False
    began: float = 0.0
    first: int = 0


@dataclass(slots=True, eq=False)
class _Save:
    """The first `pages` pages of `tokens`, to be stored from page `at` on."""

    namespace: Namespace
    tokens: IntArray
    pages: int
    priority: int
    at: int | None = None
    """The next page to copy; None: not known yet."""
    failed: bool = False


@dataclass(slots=True)
class OffloadCounters:
    """Since start, in tokens unless the name says otherwise."""

    loaded: int = 0
    saved: int = 0
    loads: int = 0
    """Paths read for requests."""
    late_loads: int = 0
    """Requests that went ahead without what was being read."""
    declined_loads: int = 0
    """Paths that were not read: computing is faster."""
    dropped_saves: int = 0
    """Requests whose KV was not written: too many waited, or it was evicted first."""
    damaged_pages: int = 0
    faults: int = 0
    """Of the folder."""


class Offloader:
    """Belongs to the engine's thread, but for what its docstring says runs on another."""

    def __init__(
        self,
        cache: PrefixCache,
        content: PageContent,
        store: PageStore,
        *,
        stride: int,
        shortest_span: int | None,
        least_tokens: int = LEAST_TOKENS,
        patience: float | None = None,
    ) -> None:
        """`shortest_span`: least tokens of moved text that the cache can use; None: it moves none.
        `patience`: seconds that a request waits for what is stored; None: as long as it would take
        to compute that, as far as is known.

        sqlite3.Error if the catalogue can be neither read nor made anew.
        """
        self.counters = OffloadCounters()
        self.give_back: Callable[[Lease], None] = cache.release
        """Releases a lease."""
        self.wake: Callable[[], None] = lambda: None
        """Called on other threads when there is something to `pump`."""
        self._cache = cache
        self._content = content
        self._store = store
        self._stride = stride
        self._shortest_span = shortest_span
        self._least = least_tokens
        self._patience = patience
        self._size = cache.page_size
        self._loads: dict[str, _Load] = {}
        self._reading: _Reading | None = None
        self._saves: deque[_Save] = deque()
        self._saving: _Save | None = None
        self._in, self._out = Buffers(content.page_bytes), Buffers(content.page_bytes)
        self._done: deque[Callable[[], object]] = deque()
        """What other threads have finished, to go on with on the engine's."""
        self._news = threading.Event()
        self._resting_until = 0.0
        self._late_in_a_row = 0
        self._warned = self._closed = False
        self._generation = 0
        self._connections: dict[str, tuple[int, Catalog]] = {}
        """By thread, each with the generation of the catalogue that it belongs to."""
        self._compute_rate: float | None = None
        self._read_rate: float | None = None
        """Tokens and bytes per second, as measured; None: not known yet."""
        self._prepare()
        self._finder = Worker("finder", 0)
        self._reader = Worker("reader", 5)
        self._writer = Worker("writer", 10)

    def _prepare(self) -> None:
        try:
            self._read_meta()
        except sqlite3.DatabaseError:
            log.warning("the store's catalogue is damaged or of another version; it starts empty")
            self._reset()
            self._read_meta()
        for _, catalog in self._connections.values():
            catalog.close()
        self._connections.clear()  # threads open their own

    def _read_meta(self) -> None:
        catalog = self._catalog()
        with catalog.changing():
            catalog.set_meta("page_bytes", str(self._content.page_bytes).encode())
        known = catalog.meta("speeds")
        with contextlib.suppress(ValueError, TypeError):
            compute, read = json.loads(known or b"[null, null]")
            self._compute_rate = None if compute is None else float(compute)
            self._read_rate = None if read is None else float(read)
        self._store.count = catalog.count()

    @property
    def page_format(self) -> PageFormat:
        """Of the pages that are kept."""
        return self._store.format

    def figures(self) -> dict[str, float]:
        """Gauges and counters by name."""
        counters = self.counters
        return {
            "stored_pages": self._store.count,
            "stored_bytes": self._store.count * self._content.page_bytes,
            "waiting_saves": len(self._saves),
            "waiting_loads": len(self._loads),
            "loaded_tokens": counters.loaded,
            "saved_tokens": counters.saved,
            "loads": counters.loads,
            "late_loads": counters.late_loads,
            "declined_loads": counters.declined_loads,
            "dropped_saves": counters.dropped_saves,
            "damaged_pages": counters.damaged_pages,
            "faults": counters.faults,
        }

    # Requests.

    def expect(self, view: RequestView) -> None:
        """A request has come: look up what is stored of it."""
        limit = (len(view.tokens) - 1) // self._size * self._size
        if self._resting or view.max_exact is not None or not self._store.count:
            return
        matched = self._cache.match(view)
        if limit - matched < self._least:
            return
        load = _Load(view, time.monotonic() + self._wait_for(limit - matched, _LONGEST_LOOKUP))
        self._loads[view.rid] = load
        find = partial(self._find, view, view.tokens.copy(), matched, limit)
        self._run(self._finder, find, partial(self._found, load))

    def awaited(self, rid: str) -> bool:
        """Whether the request should wait for what is being read for it."""
        load = self._loads.get(rid)
        if load is None:
            return False
        if time.monotonic() < load.deadline and not self._resting:
            return True
        self.counters.late_loads += 1
        self._late_in_a_row += 1
        if self._late_in_a_row >= _LATE_IN_A_ROW:
            self._late_in_a_row = 0
            self._rest("reading takes longer than computing")
        self.forget(rid)
        return False

    def forget(self, rid: str) -> None:
        """Nothing more has to be read for this request."""
        load = self._loads.pop(rid, None)
        if load is not None and self._reading is not None and self._reading.load is load:
            self._reading.cancelled = True

    def offer(self, lease: Lease, tokens: IntArray) -> None:
        """A request ends, its lease still held: store what it published, once there is time."""
        pages = lease.published // self._size
        if pages * self._size < self._least or len(tokens) <= pages * self._size or self._resting:
            return
        self._saves.append(
            _Save(lease.namespace, tokens[: pages * self._size + 1].copy(), pages, lease.priority)
        )
        if len(self._saves) > _MOST_SAVES:
            self._saves.popleft()
            self.counters.dropped_saves += 1

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` tokens of prompts in this time."""
        if tokens >= self._least and seconds > 0:
            self._compute_rate = _mean(self._compute_rate, tokens / seconds)

    # Between two steps.

    def pump(self, seconds: float) -> bool:
        """Go on with loads and saves for about this long; False if there was nothing to do."""
        end, worked = time.monotonic() + seconds, False
        while self._done:
            self._done.popleft()()
            worked = True
            if time.monotonic() >= end:
                return True
        self._next_load()
        while time.monotonic() < end and self._save_more():
            worked = True
        return worked

    def wait(self, seconds: float) -> None:
        """Wait for something to `pump`: for an engine that has nothing else to do."""
        if not self._done:
            self._news.wait(seconds)
        self._news.clear()

    def close(self, seconds: float = 10.0) -> None:
        """Write what waits to be written, for up to this long, and let go of the folder."""
        self._loads.clear()
        if self._reading is not None:
            self._reading.cancelled = True
        end = time.monotonic() + seconds
        while self._busy_saving and not self._resting and time.monotonic() < end:
            if not self.pump(1.0):
                self.wait(0.05)
        self._closed = True
        self._writer.put(partial(self._guarded, self._write_speeds))
        stopped = [each.stop(5.0) for each in (self._writer, self._reader, self._finder)]
        if all(stopped):  # else a thread hangs in the file system, and still uses them
            for _, catalog in self._connections.values():
                catalog.close()
            self._store.close()

    @property
    def _busy_saving(self) -> bool:
        return bool(self._saves or self._saving or self._done or not self._out.all_free)

    @property
    def _resting(self) -> bool:
        return time.monotonic() < self._resting_until

    # Loading.

    def _find(
        self, view: RequestView, tokens: IntArray, matched: int, limit: int
    ) -> list[StoredPath]:
        """On the finder's thread: what is stored of a prompt beyond its first `matched` tokens."""
        catalog = self._catalog()
        root = self._store.root(catalog, view.namespace)
        pages = catalog.prefix(root, tokens[:limit])
        covered, paths = len(pages) * self._size, []
        if covered - matched >= self._least:
            paths.append(StoredPath(tokens[:covered], pages, covered - matched))
        covered, shortest = max(covered, matched), self._shortest_span
        if shortest is not None and view.fuzzy and len(tokens) - covered >= self._least:
            paths += catalog.spans(root, tokens, covered, shortest, _SEARCH_SECONDS)
        return [path for path in paths if path.gain >= self._least]

    def _found(self, load: _Load, paths: list[StoredPath] | None) -> None:
        if paths is not None:
            self._late_in_a_row = 0
        if self._loads.get(load.view.rid) is not load:
            return  # it has gone ahead, or away
        load.paths = deque(paths or ())
        gain = sum(path.gain for path in load.paths)
        load.deadline = time.monotonic() + self._wait_for(gain, _LONGEST_WAIT)

    def _wait_for(self, tokens: int, longest: float) -> float:
        """Seconds that a request may wait for so many tokens."""
        if self._patience is not None or self._compute_rate is None:
            return longest if self._patience is None else self._patience
        return min(longest, tokens / self._compute_rate)

    def _next_load(self) -> None:
        """Start to read the next path, if none is being read."""
        while self._reading is None and not self._closed:
            load = next((each for each in self._loads.values() if each.paths is not None), None)
            if load is None:
                return
            assert load.paths is not None
            if not load.paths:
                del self._loads[load.view.rid]
                continue
            path = load.paths.popleft()
            first = self._cache.match(self._view(load, path.tokens)) // self._size
            if first >= len(path.pages):
                continue
            if not self._pays(len(path.pages) - first, path.gain):
                self.counters.declined_loads += 1
                continue
            self.counters.loads += 1
            self._reading = _Reading(load, path, first, began=time.monotonic(), first=first)
            self._run(self._reader, partial(self._read, self._reading), self._read_up)

    def _pays(self, pages: int, gain: int) -> bool:
        """Whether to read `pages` takes less time than to compute `gain` tokens."""
        if self._read_rate is None or self._compute_rate is None or self._patience is not None:
            return True  # not measured yet: this load will be
        needed = pages * self._content.page_bytes / self._read_rate
        return needed < gain / self._compute_rate

    def _read(self, reading: _Reading) -> _Reading:
        """On the reader's thread: read a path, buffer by buffer, as fast as they are emptied."""
        at, pages = reading.at, reading.path.pages
        while at < len(pages) and not reading.cancelled:
            buffer = self._in.take(0.05)
            if buffer is None:
                continue
            some = pages[at : at + len(buffer)]
            sound = 0
            try:
                sound = self._store.read(some, buffer)
            finally:
                self._tell(partial(self._arrived, reading, at, sound, buffer))
            if sound < len(some):
                self._tell(partial(self._is_damaged, some[sound].key))
                break
            at += sound
        return reading

    def _arrived(self, reading: _Reading, first: int, count: int, buffer: ByteArray) -> None:
        """Copy pages that were read to the cache, behind those before them."""
        try:
            if count and not reading.cancelled and not self._restore(reading, first, count, buffer):
                reading.cancelled = True
        except Exception:
            reading.cancelled = True
            self.counters.faults += 1
            log.warning("stored KV could not be taken over", exc_info=True)
        finally:
            self._in.give(buffer)

    def _restore(self, reading: _Reading, first: int, count: int, buffer: ByteArray) -> bool:
        end = first + count
        text = reading.path.tokens[: end * self._size]
        lease = self._cache.lease(self._view(reading.load, text))
        try:
            there = len(lease.pages)
            if there < first or not self._cache.grow(lease, end * self._size):
                return False  # what came before was evicted, or there is no room
            if there < end:
                self._content.copy_in(lease.pages[there:end].copy(), buffer[there - first : count])
                self._cache.publish(lease, text, computed=len(text))
                self.counters.loaded += (end - there) * self._size
        finally:
            self.give_back(lease)
        reading.at = end
        self._late_in_a_row = 0
        return True

    def _read_up(self, reading: _Reading | None) -> None:
        reading, self._reading = self._reading, None
        if reading is None or reading.cancelled:
            return
        count = reading.at - reading.first
        if count:
            seconds = max(time.monotonic() - reading.began, 1e-6)
            self._read_rate = _mean(self._read_rate, count * self._content.page_bytes / seconds)

    def _is_damaged(self, key: str) -> None:
        self.counters.damaged_pages += 1
        self._run(self._writer, lambda: self._store.remove(self._catalog(), key), lambda _: None)

    def _view(self, load: _Load, tokens: IntArray) -> RequestView:
        """A request for these tokens, all of which a lease of it may cover."""
        of = load.view
        return RequestView(
            "store", np.append(tokens, np.int32(0)), of.namespace, of.priority,
            fuzzy=False, semantic=False,
        )  # fmt: skip

    # Saving.

    def _save_more(self) -> bool:
        """Copy the next buffer's worth of pages to be written; False if that is not possible."""
        if self._resting:
            self._saves.clear()
        save = self._saving
        if save is None and self._saves:
            self._saving = save = self._saves.popleft()
            self._run(self._writer, partial(self._first_missing, save), self._planned)
        if save is None or save.at is None:
            return False
        buffer = self._out.take(0)
        if buffer is None:
            return False
        first, count = save.at, 0
        try:
            count = self._copy(save, first, buffer)
        finally:
            if not count:
                self._saving = None
                self._out.give(buffer)
        if count:
            save.at += count
            write = partial(self._write, save, first, count, buffer)
            self._run(self._writer, write, partial(self._written, count))
            if save.at == save.pages:
                self._saving = None
        return True

    def _first_missing(self, save: _Save) -> _Save:
        """On the writer's thread: what is stored of a text already is used now."""
        catalog = self._catalog()
        root = self._store.root(catalog, save.namespace)
        known = catalog.prefix(root, save.tokens)
        with catalog.changing():
            catalog.touch(known)
        save.at = len(known)
        return save

    def _planned(self, save: _Save | None) -> None:
        if save is None or save.at == save.pages:
            self._saving = None

    def _copy(self, save: _Save, first: int, buffer: ByteArray) -> int:
        """Copy pages from `first` on to `buffer`, as far as they are still cached; how many."""
        end = min(save.pages, first + len(buffer))
        text = save.tokens[: end * self._size + 1]
        view = RequestView(
            "store", text, save.namespace, save.priority, fuzzy=False, semantic=False
        )
        lease = self._cache.lease(view)
        try:
            pages = lease.pages[first:end].copy()
            if len(pages):
                self._content.copy_out(pages, buffer[: len(pages)])
        finally:
            self.give_back(lease)
        if len(pages) < end - first:
            self.counters.dropped_saves += 1
            save.pages = first + len(pages)
        return len(pages)

    def _write(self, save: _Save, first: int, count: int, buffer: ByteArray) -> bool:
        """On the writer's thread: store pages, unless those before them could not be stored."""
        try:
            if save.failed:
                return False
            save.failed = True  # unless all goes well
            catalog = self._catalog()
            root = self._store.root(catalog, save.namespace)
            self._store.write(catalog, root, save.tokens, first, buffer[:count])
            save.failed = False
            return True
        except (LookupError, sqlite3.IntegrityError):
            return False  # a page before was evicted, or these were stored meanwhile
        finally:
            self._out.give(buffer)

    def _written(self, count: int, stored: bool | None) -> None:
        if stored:
            self.counters.saved += count * self._size

    # Other threads.

    def _run(
        self,
        worker: Worker,
        call: Callable[[], _Result],
        then: Callable[[_Result | None], object],
    ) -> None:
        """Have a worker make the call; `then` gets its result in `pump`, None after a fault."""

        def work() -> None:
            result = self._guarded(call)
            self._tell(lambda: then(result))

        worker.put(work)

    def _guarded(self, call: Callable[[], _Result]) -> _Result | None:
        """The result of a call that uses the folder; None, and a rest, if that fails."""
        try:
            return call()
        except sqlite3.OperationalError as error:
            self._fault(error)
        except sqlite3.DatabaseError as error:
            self._fault(error)
            self._writer.put(self._start_again)
        except Exception as error:
            self._fault(error)
        return None

    def _fault(self, error: BaseException) -> None:
        self.counters.faults += 1
        self._rest(f"{type(error).__name__}: {error}")

    def _rest(self, why: str) -> None:
        self._resting_until = time.monotonic() + _REST_SECONDS
        if not self._warned:
            self._warned = True
            log.warning(
                "the KV store in %s cannot be used now (%s); requests go on without it, and it is "
                "tried again every %d s",
                self._store.folder,
                why,
                _REST_SECONDS,
            )

    def _tell(self, then: Callable[[], object]) -> None:
        self._done.append(then)
        self._news.set()
        self.wake()

    def _catalog(self) -> Catalog:
        """The calling thread's connection to the catalogue."""
        name = threading.current_thread().name
        generation, catalog = self._connections.get(name, (-1, None))
        if catalog is None or generation != self._generation:
            if catalog is not None:
                catalog.close()
            generation, catalog = self._generation, self._store.connect(self._stride)
            self._connections[name] = generation, catalog
        return catalog

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
        self._store.clear()
        catalog = self._catalog()
        with catalog.changing():
            catalog.set_meta("page_bytes", str(self._content.page_bytes).encode())

    def _write_speeds(self) -> None:
        catalog = self._catalog()
        with catalog.changing():
            speeds = json.dumps([self._compute_rate, self._read_rate])
            catalog.set_meta("speeds", speeds.encode())


def _mean(known: float | None, new: float) -> float:
    return new if known is None else _OLD_SHARE * known + (1 - _OLD_SHARE) * new
