"""Reads stored pages back for requests that wait, where reading is faster than computing."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvweave.kv.pool import IntArray
from kvweave.prefix.contract import PrefixCache
from kvweave.prefix.lease import Lease, RequestView
from kvweave.store.catalog import StoredPath
from kvweave.store.pages import ByteArray
from kvweave.store.speeds import OffloadCounters, PageContent, Speeds, mean
from kvweave.store.threads import Buffers, StoreAccess

log = logging.getLogger("kvweave.store")

_LONGEST_LOOKUP, _LONGEST_WAIT = 1.0, 30.0
"""A request waits no longer to know what is stored, and for what is."""
_SEARCH_SECONDS = 0.1
"""For moved text; what is found by then is read."""
_LATE_IN_A_ROW = 4
"""Requests that waited in vain, after which the folder counts as faulty."""


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


class Loads:
    """What waiting requests can use of the store. Belongs to the engine's thread."""

    def __init__(
        self,
        access: StoreAccess,
        cache: PrefixCache,
        content: PageContent,
        counters: OffloadCounters,
        speeds: Speeds,
        least: int,
        shortest_span: int | None,
        patience: float | None,
    ) -> None:
        """The last four are the Offloader's."""
        self.give_back: Callable[[Lease], None] = cache.release
        self._access = access
        self._cache = cache
        self._content = content
        self.counters = counters
        self._speeds = speeds
        self._least = least
        self._shortest_span = shortest_span
        self._patience = patience
        self._size = cache.page_size
        self._loads: dict[str, _Load] = {}
        self._reading: _Reading | None = None
        self._in = Buffers(content.page_bytes)
        self._late_in_a_row = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._loads)

    def close(self) -> None:
        """Read nothing more."""
        self._closed = True
        self._loads.clear()
        if self._reading is not None:
            self._reading.cancelled = True

    def expect(self, view: RequestView) -> None:
        """A request has come: look up what is stored of it."""
        limit = (len(view.tokens) - 1) // self._size * self._size
        if self._access.resting or view.max_exact is not None or not self._access.store.count:
            return
        matched = self._cache.match(view)
        if limit - matched < self._least:
            return
        load = _Load(view, time.monotonic() + self._wait_for(limit - matched, _LONGEST_LOOKUP))
        self._loads[view.rid] = load
        find = partial(self._find, view, view.tokens.copy(), matched, limit)
        self._access.run(self._access.finder, find, partial(self._found, load))

    def awaited(self, rid: str) -> bool:
        """Whether the request should wait for what is being read for it."""
        load = self._loads.get(rid)
        if load is None:
            return False
        if time.monotonic() < load.deadline and not self._access.resting:
            return True
        self.counters.late_loads += 1
        self._late_in_a_row += 1
        if self._late_in_a_row >= _LATE_IN_A_ROW:
            self._late_in_a_row = 0
            self._access.rest("reading takes longer than computing")
        self.forget(rid)
        return False

    def forget(self, rid: str) -> None:
        """Nothing more has to be read for this request."""
        load = self._loads.pop(rid, None)
        if load is not None and self._reading is not None and self._reading.load is load:
            self._reading.cancelled = True

    def _find(
        self, view: RequestView, tokens: IntArray, matched: int, limit: int
    ) -> list[StoredPath]:
        """On the finder's thread: what is stored of a prompt beyond its first `matched` tokens."""
        catalog = self._access.catalog()
        root = self._access.store.root(catalog, view.namespace)
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
        if not paths:
            del self._loads[load.view.rid]
            return
        load.paths = deque(paths)
        gain = sum(path.gain for path in load.paths)
        load.deadline = time.monotonic() + self._wait_for(gain, _LONGEST_WAIT)

    def _wait_for(self, tokens: int, longest: float) -> float:
        """Seconds that a request may wait for so many tokens."""
        if self._patience is not None or self._speeds.compute is None:
            return longest if self._patience is None else self._patience
        return min(longest, tokens / self._speeds.compute)

    def go_on(self) -> None:
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
            self._access.run(self._access.reader, partial(self._read, self._reading), self._read_up)

    def _pays(self, pages: int, gain: int) -> bool:
        """Whether to read `pages` takes less time than to compute `gain` tokens."""
        if self._speeds.read is None or self._speeds.compute is None or self._patience is not None:
            return True  # not measured yet: this load will be
        needed = pages * self._content.page_bytes / self._speeds.read
        return needed < gain / self._speeds.compute

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
                sound = self._access.store.read(some, buffer)
            finally:
                self._access.tell(partial(self._arrived, reading, at, sound, buffer))
            if sound < len(some):
                self._access.tell(partial(self._is_damaged, some[sound].key))
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
            self._access.faults += 1
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
            self._speeds.read = mean(self._speeds.read, count * self._content.page_bytes / seconds)

    def _is_damaged(self, key: str) -> None:
        self.counters.damaged_pages += 1
        self._access.run(
            self._access.writer,
            lambda: self._access.store.remove(self._access.catalog(), key),
            lambda _: None,
        )

    def _view(self, load: _Load, tokens: IntArray) -> RequestView:
        """A request for these tokens, all of which a lease of it may cover."""
        of = load.view
        return RequestView(
            "store", np.append(tokens, np.int32(0)), of.namespace, of.priority,
            fuzzy=False, semantic=False,
        )  # fmt: skip
