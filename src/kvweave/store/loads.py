"""Reads stored pages back for requests that wait, where reading is faster than computing."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Lease, RequestView
from kvweave.store.access import BUFFER_BYTES, Offloading
from kvweave.store.catalog import StoredPath
from kvweave.store.figures import mean

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
    """A path on its way from the store to pages of a lease.

    The reader takes piece after piece, and copies with `copying` held: whoever has set `cancelled`
    and then held the lock once may give the pages back, even if the reader hangs in a file system.
    """

    load: _Load
    path: StoredPath
    lease: Lease
    pages: IntArray
    """Where the path's pages go, as far as there is room."""
    first: int
    """Page with which reading begins."""
    at: int
    """Pages before this one are in the cache."""
    began: float
    copying: threading.Lock = field(default_factory=threading.Lock)
    cancelled: bool = False


class Loads:
    """What waiting requests can use of the store. Belongs to the engine's thread."""

    def __init__(
        self, common: Offloading, shortest_span: int | None, patience: float | None
    ) -> None:
        """`shortest_span` and `patience` are the Offloader's."""
        self._of = common
        self._access, self._counters = common.access, common.counters
        self._shortest_span = shortest_span
        self._patience = patience
        self._size = common.cache.page_size
        self._loads: dict[str, _Load] = {}
        self._reading: _Reading | None = None
        self._piece = max(1, BUFFER_BYTES // common.content.page_bytes)
        self._late_in_a_row = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._loads)

    def close(self) -> None:
        """Read nothing more."""
        self._closed = True
        self._loads.clear()
        if self._reading is not None:
            self._stop(self._reading)

    @property
    def leases(self) -> list[Lease]:
        """What is being read holds these."""
        return [] if self._reading is None else [self._reading.lease]

    def readers_at_work(self) -> int:
        """Threads that are reading: they leave their core to whoever wants it."""
        return int(self._reading is not None)

    def give_way(self) -> bool:
        """Give back what is held for a request that waits, which goes ahead without the rest."""
        if self._reading is None:
            return False
        self.forget(self._reading.load.view.rid)
        return True

    def expect(self, view: RequestView) -> None:
        """A request has come: look up what is stored of it."""
        limit = (len(view.tokens) - 1) // self._size * self._size
        if self._access.resting or view.max_exact is not None or not self._access.store.count:
            return
        matched = self._of.cache.match(view)
        if limit - matched < self._of.least:
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
        self._counters.late_loads += 1
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
            self._stop(self._reading)

    def _find(
        self, view: RequestView, tokens: IntArray, matched: int, limit: int
    ) -> list[StoredPath]:
        """On the finder's thread: what is stored of a prompt beyond its first `matched` tokens."""
        catalog = self._access.catalog()
        root = self._access.store.root(catalog, view.namespace)
        pages = catalog.prefix(root, tokens[:limit])
        covered, paths = len(pages) * self._size, []
        if covered - matched >= self._of.least:
            paths.append(StoredPath(tokens[:covered], pages, covered - matched))
        covered, shortest = max(covered, matched), self._shortest_span
        if shortest is not None and view.fuzzy and len(tokens) - covered >= self._of.least:
            paths += catalog.spans(root, tokens, covered, shortest, _SEARCH_SECONDS)
        return [path for path in paths if path.gain >= self._of.least]

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
        if self._patience is not None or self._of.speeds.compute is None:
            return longest if self._patience is None else self._patience
        return min(longest, tokens / self._of.speeds.compute)

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
            first = self._of.cache.match(self._view(load, path.tokens)) // self._size
            if first >= len(path.pages):
                continue
            if not self._pays(len(path.pages) - first, path.gain):
                self._counters.declined_loads += 1
                continue
            self._begin(load, path)

    def _begin(self, load: _Load, path: StoredPath) -> None:
        """Read a path to pages of a lease, as many as there is room for."""
        cache = self._of.cache
        lease = cache.lease(self._view(load, path.tokens))
        try:
            first = len(lease.pages)
            end = min(len(path.pages), first + cache.pool.num_free + cache.evictable_pages)
            if end > first and cache.grow(lease, end * self._size):
                pages = lease.pages[:end].copy()
                self._reading = _Reading(load, path, lease, pages, first, first, time.monotonic())
        finally:
            if self._reading is None:
                self._of.give_back(lease)
        if self._reading is not None:
            self._counters.loads += 1
            read = partial(self._read, self._reading)
            self._access.run(self._access.reader, read, partial(self._ended, self._reading))

    def _pays(self, pages: int, gain: int) -> bool:
        """Whether to read `pages` takes less time than to compute `gain` tokens."""
        if (
            self._of.speeds.read is None
            or self._of.speeds.compute is None
            or self._patience is not None
        ):
            return True  # not measured yet: this load will be
        needed = pages * self._of.content.page_bytes / self._of.speeds.read
        return needed < gain / self._of.speeds.compute

    def _read(self, reading: _Reading) -> None:
        """On the reader's thread: read a path piece by piece."""
        buffer = np.empty((self._piece, self._of.content.page_bytes), np.uint8)
        for begin in range(reading.first, len(reading.pages), self._piece):
            to = reading.pages[begin : begin + self._piece]
            some = reading.path.pages[begin : begin + len(to)]
            sound = self._access.store.read(some, buffer)
            with reading.copying:
                if reading.cancelled:
                    return
                self._of.content.copy_in(to[:sound], buffer[:sound])
            self._access.tell(partial(self._arrived, reading, begin + sound))
            if sound < len(some):
                self._access.tell(partial(self._is_damaged, some[sound].key))
                return

    def _arrived(self, reading: _Reading, end: int) -> None:
        """All pages before `end` have their content: publish them."""
        if reading.cancelled or end == reading.at:
            return
        try:
            tokens = reading.path.tokens
            self._of.cache.publish(reading.lease, tokens, computed=end * self._size)
        except Exception:
            self._access.faults += 1
            log.warning("stored KV could not be taken over", exc_info=True)
            self._stop(reading)
            return
        self._counters.loaded += (end - reading.at) * self._size
        reading.at = end
        self._late_in_a_row = 0

    def _ended(self, reading: _Reading, _: None) -> None:
        if reading.cancelled:
            return
        self._stop(reading)
        count = reading.at - reading.first
        if count:
            seconds = max(time.monotonic() - reading.began, 1e-6)
            self._of.speeds.read = mean(
                self._of.speeds.read, count * self._of.content.page_bytes / seconds
            )

    def _stop(self, reading: _Reading) -> None:
        """Give back the pages of a path, whether it was read to its end or not."""
        reading.cancelled = True
        with reading.copying:
            pass  # from now on the reader copies nothing
        self._reading = None
        self._of.give_back(reading.lease)

    def _is_damaged(self, key: str) -> None:
        self._counters.damaged_pages += 1
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
