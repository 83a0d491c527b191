"""Reads stored pages back for requests that wait, where reading is faster than computing."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np

from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import RequestView
from kvweave.store.access import Buffers, Offloading
from kvweave.store.catalog import StoredPath
from kvweave.store.figures import mean
from kvweave.store.pages import ByteArray

log = logging.getLogger("kvweave.store")

_LONGEST_LOOKUP, _LONGEST_WAIT = 1.0, 30.0
"""A request waits no longer to know what is stored, and for what is."""
_SEARCH_SECONDS = 0.1
"""For moved text; what is found by then is read."""
_LATE_IN_A_ROW = 4
"""Requests that waited in vain, after which the folder counts as faulty."""
_COPIED_PER_SECOND = 3e9
"""Bytes, about: how much is copied to the cache in the time that there is."""

_Pages: TypeAlias = tuple[ByteArray, int, int]
"""Of a buffer those from one index up to another."""


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
    first: int
    """Page with which reading begins."""
    at: int
    began: float
    arrived: deque[_Pages] = field(default_factory=deque)
    """What is still to be copied, the next page first. Belongs to the engine's thread."""
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
        self._in = Buffers(common.content.page_bytes)
        self._late_in_a_row = 0
        self._closed = False
        self.until = 0.0
        """When to leave the rest of what has arrived for later (time.monotonic)."""

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
            self._reading.cancelled = True

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
            self._counters.loads += 1
            # Its memory may never have been used: a thread takes the page faults meanwhile.
            new = self._of.cache.pool.upcoming(len(path.pages) - first)
            self._access.provider.put(partial(self._of.content.provide, new))
            self._reading = _Reading(load, path, first, first, time.monotonic())
            self._access.run(self._access.reader, partial(self._read, self._reading), self._read_up)

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

    def _read(self, reading: _Reading) -> _Reading:
        """On the reader's thread: read a path, buffer by buffer, as fast as they are emptied."""
        at, pages = reading.first, reading.path.pages
        while at < len(pages) and not reading.cancelled:
            buffer = self._in.take(0.05)
            if buffer is None:
                continue
            some = pages[at : at + len(buffer)]
            sound = 0
            try:
                sound = self._access.store.read(some, buffer)
            finally:
                self._access.tell(partial(self._arrived, reading, (buffer, 0, sound)))
            if sound < len(some):
                self._access.tell(partial(self._is_damaged, some[sound].key))
                break
            at += sound
        return reading

    def _arrived(self, reading: _Reading, pages: _Pages) -> None:
        reading.arrived.append(pages)
        self._take_over(reading)

    def _take_over(self, reading: _Reading) -> None:
        """Copy pages that were read to the cache, as many as there is time for."""
        try:
            if not reading.cancelled and not self._restore(reading, self._affordable()):
                reading.cancelled = True
        except Exception:
            reading.cancelled = True
            self._access.faults += 1
            log.warning("stored KV could not be taken over", exc_info=True)
        while reading.arrived:
            buffer, begin, end = reading.arrived[0]
            if begin < end and not reading.cancelled:
                self._access.done.appendleft(partial(self._take_over, reading))
                return
            reading.arrived.popleft()
            self._in.give(buffer)

    def _affordable(self) -> int:
        """Pages that can be copied until the time is over; one at least."""
        left = self.until - time.monotonic()
        return max(1, int(left * _COPIED_PER_SECOND / self._of.content.page_bytes))

    def _restore(self, reading: _Reading, most: int) -> bool:
        """Give up to `most` of the pages that have arrived to the cache; False if it has no room,
        or has evicted what comes before them."""
        count = min(most, sum(end - begin for _, begin, end in reading.arrived))
        if not count:
            return True
        end = reading.at + count
        text = reading.path.tokens[: end * self._size]
        cache = self._of.cache
        lease = cache.lease(self._view(reading.load, text))
        try:
            there = len(lease.pages)
            if there < reading.at or not cache.grow(lease, end * self._size):
                return False
            self._fill(reading, lease.pages[:end].copy(), there)
            if there < end:
                cache.publish(lease, text, computed=len(text))
                self._counters.loaded += (end - there) * self._size
        finally:
            self._of.give_back(lease)
        self._late_in_a_row = 0
        return True

    def _fill(self, reading: _Reading, pages: IntArray, there: int) -> None:
        """Copy what has arrived to `pages`, which are a text's; the first `there` have it."""
        for which, (buffer, begin, end) in enumerate(reading.arrived):
            stop = min(end, begin + len(pages) - reading.at)
            skipped = min(max(0, there - reading.at), stop - begin)
            target = pages[reading.at + skipped : reading.at + stop - begin]
            if len(target):
                self._of.content.copy_in(target, buffer[begin + skipped : stop])
            reading.at += stop - begin
            reading.arrived[which] = buffer, stop, end

    def _read_up(self, reading: _Reading | None) -> None:
        reading, self._reading = self._reading, None
        if reading is None or reading.cancelled:
            return
        count = reading.at - reading.first
        if count:
            seconds = max(time.monotonic() - reading.began, 1e-6)
            self._of.speeds.read = mean(
                self._of.speeds.read, count * self._of.content.page_bytes / seconds
            )

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
