"""Writes the pages of ended requests to the store, in the background, one buffer at a time."""

from __future__ import annotations

import sqlite3
from collections import deque
from dataclasses import dataclass
from functools import partial

from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Lease, Namespace, RequestView
from kvweave.store.access import Buffers, Offloading
from kvweave.store.pages import ByteArray

_MOST_SAVES = 1024
"""Requests whose KV may wait to be written; the oldest are dropped."""


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


class Saves:
    """A bounded queue of texts whose pages are to be stored. Belongs to the engine's thread."""

    def __init__(self, common: Offloading) -> None:
        self._of = common
        self._access, self._counters = common.access, common.counters
        self._size = common.cache.page_size
        self._saves: deque[_Save] = deque()
        self._saving: _Save | None = None
        self._out = Buffers(common.content.page_bytes)

    def __len__(self) -> int:
        return len(self._saves)

    @property
    def busy(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._saves or self._saving or not self._out.all_free)

    def offer(self, lease: Lease, tokens: IntArray) -> None:
        """A request ends, its lease still held: store what it published, once there is time."""
        pages = lease.published // self._size
        if (
            pages * self._size < self._of.least
            or len(tokens) <= pages * self._size
            or self._access.resting
        ):
            return
        self._saves.append(
            _Save(lease.namespace, tokens[: pages * self._size + 1].copy(), pages, lease.priority)
        )
        if len(self._saves) > _MOST_SAVES:
            self._saves.popleft()
            self._counters.dropped_saves += 1

    def newest_first(self) -> None:
        """From now on write what was offered last first: there may be no time for all."""
        self._saves.reverse()

    def go_on(self) -> bool:
        """Copy the next buffer's worth of pages to be written; False if that is not possible."""
        if self._access.resting:
            self._saves.clear()
        save = self._saving
        if save is None and self._saves:
            self._saving = save = self._saves.popleft()
            self._access.run(self._access.writer, partial(self._first_missing, save), self._planned)
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
            self._access.run(self._access.writer, write, partial(self._written, count))
            if save.at == save.pages:
                self._saving = None
        return True

    def _first_missing(self, save: _Save) -> _Save:
        """On the writer's thread: what is stored of a text already is used now."""
        catalog = self._access.catalog()
        root = self._access.store.root(catalog, save.namespace)
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
        lease = self._of.cache.lease(view)
        try:
            pages = lease.pages[first:end].copy()
            if len(pages):
                self._of.content.copy_out(pages, buffer[: len(pages)])
        finally:
            self._of.give_back(lease)
        if len(pages) < end - first:
            self._counters.dropped_saves += 1
            save.pages = first + len(pages)
        return len(pages)

    def _write(self, save: _Save, first: int, count: int, buffer: ByteArray) -> bool:
        """On the writer's thread: store pages, unless those before them could not be stored."""
        try:
            if save.failed:
                return False
            save.failed = True  # unless all goes well
            catalog = self._access.catalog()
            root = self._access.store.root(catalog, save.namespace)
            self._access.store.write(catalog, root, save.tokens, first, buffer[:count])
            save.failed = False
            return True
        except (LookupError, sqlite3.IntegrityError):
            return False  # a page before was evicted, or these were stored meanwhile
        finally:
            self._out.give(buffer)

    def _written(self, count: int, stored: bool | None) -> None:
        if stored:
            self._counters.saved += count * self._size
