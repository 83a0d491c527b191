"""A folder of stored pages: the catalogue, the file with their content, the lock, the size bound.

    DIR/FORMAT.0/   lock            held by the process that uses the folder
                    catalog.sqlite  which text lies where
                    pages           slots of one page's bytes each

FORMAT is a hash of model, number type and layout: folders of other models wait beside, and are
deleted, oldest first, when the room is needed. A second process with the same model, such as
another replica, uses FORMAT.1.

A page is entered in the catalogue after its content was written, and leaves it before its slot is
reused. Content is read with a checksum that also covers the page's key: whatever was interrupted or
damaged in between, a slot that does not hold the page it should is a miss.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Namespace
from kvweave.store.catalog import Catalog, StoredPage, is_key

ByteArray = npt.NDArray[np.uint8]

_MOST_FOLDERS = 1024
"""Processes that may use one DIR at once with one model."""
_LOCK, _CATALOG, _PAGES = "lock", "catalog.sqlite", "pages"


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What the bytes of a page are: equal only where they can be used for each other."""

    identity: str
    """Of the model, its number type and KV layout."""
    page_size: int
    page_bytes: int
    dtype: str
    """Of the KV pool."""

    @property
    def name(self) -> str:
        text = f"{self.identity}|{self.page_size}|{self.page_bytes}|{self.dtype}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class PageStore:
    """One process's folder of pages. `write`, `evict` and `remove` belong to one thread."""

    def __init__(self, directory: Path, page_format: PageFormat, most_bytes: int) -> None:
        """Takes a free folder, made if need be. OSError where that is not possible."""
        self.format = page_format
        self._directory = directory
        self._most_slots = max(1, most_bytes // page_format.page_bytes)
        self._most_bytes = most_bytes
        self.folder, self._lock = _lock_a_folder(directory, page_format.name)
        self._pages = -1
        self._free: list[int] | None = None
        """Slots to write to, the first last; not known before the first write."""
        self._end = 0
        """Slots from here on were never written."""
        self.count = 0
        """Pages stored, as of the last write."""
        self._open()
        self._drop_old_folders(0)

    def _open(self) -> None:
        flags = os.O_CREAT | os.O_RDWR
        self._pages = os.open(self.folder / _PAGES, flags, 0o600)

    def close(self) -> None:
        os.close(self._pages)
        os.close(self._lock)

    def connect(self, stride: int) -> Catalog:
        """A connection of the calling thread's own."""
        catalog = Catalog(self.folder / _CATALOG, self.format.page_size, stride)
        with catalog.changing():
            catalog.set_meta("page_bytes", str(self.format.page_bytes).encode())
        return catalog

    def root(self, catalog: Catalog, namespace: Namespace) -> str:
        """The parent key of the namespace's first pages."""
        return catalog.root(namespace, self.format.name)

    def clear(self) -> None:
        """Start again from nothing: the catalogue is damaged. Connections must be closed."""
        for name in (_CATALOG, f"{_CATALOG}-wal", f"{_CATALOG}-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / name)
        os.ftruncate(self._pages, 0)
        self._free, self.count = None, 0

    # Reading, on any thread.

    def read(self, pages: Sequence[StoredPage], out: ByteArray) -> int:
        """Read `pages` to the rows of `out`; returns how many, from the first on, are sound."""
        for at, page in enumerate(pages):
            if not isinstance(page.slot, int) or not 0 <= page.slot < self._most_slots:
                pages = pages[:at]
                break
        for first, count in _runs([page.slot for page in pages]):
            view = out[first : first + count].reshape(-1).data
            offset, done = pages[first].slot * self.format.page_bytes, 0
            while done < len(view):
                got = os.preadv(self._pages, [view[done:]], offset + done)
                if not got:
                    break
                done += got
            for at in range(first, first + count):
                if _checksum(pages[at].key, out[at]) != pages[at].checksum:
                    return at
        return len(pages)

    # Writing, on one thread.

    def write(
        self, catalog: Catalog, root: str, tokens: IntArray, first: int, content: ByteArray
    ) -> None:
        """Store pages `first` and on of the text `tokens`, whose pages before are stored.

        OSError or sqlite3.Error if that fails; nothing is entered then.
        """
        self._check_folder()
        keys = catalog.keys(root, tokens)[first : first + len(content)]
        slots = self._take_slots(catalog, len(content))
        entered = False
        try:
            for start, count in _runs(slots):
                view = content[start : start + count].reshape(-1).data
                offset, done = slots[start] * self.format.page_bytes, 0
                while done < len(view):
                    done += os.pwrite(self._pages, view[done:], offset + done)
            sums = [_checksum(key, row) for key, row in zip(keys, content, strict=True)]
            with catalog.changing():
                catalog.add(root, tokens, first, list(zip(slots, sums, strict=True)))
            entered = True
        finally:
            if not entered and self._free is not None:
                self._free += slots[::-1]
        self.count += len(slots)

    def remove(self, catalog: Catalog, key: str) -> None:
        """Forget a page that turned out to be damaged, and what continues it."""
        self._know_slots(catalog)
        with catalog.changing():
            gone = catalog.remove(key)
        self._give_slots(gone)

    def _take_slots(self, catalog: Catalog, count: int) -> list[int]:
        """Slots that no page is in, ascending; evicts for them if need be."""
        free = self._know_slots(catalog)
        short = count - len(free) - max(0, self._most_slots - self._end)
        if short > 0:
            with catalog.changing():
                gone = catalog.evict(short)
            self._give_slots(gone)
        if self._end < self._most_slots and len(free) < count:
            more = min(count - len(free), self._most_slots - self._end)
            free[:0] = range(self._end + more - 1, self._end - 1, -1)
            self._end += more
            self._drop_old_folders(self._end * self.format.page_bytes)
        if len(free) < count:
            raise OSError("the store is too small for what is to be stored at once")
        taken = sorted(free[-count:])
        del free[-count:]
        return taken

    def _know_slots(self, catalog: Catalog) -> list[int]:
        if self._free is None:
            used = {slot for slot in catalog.slots() if isinstance(slot, int)}
            written = os.fstat(self._pages).st_size // self.format.page_bytes
            self._end = min(written, self._most_slots)
            self._free = [slot for slot in range(self._end - 1, -1, -1) if slot not in used]
            self.count = len(used)
            outside = [slot for slot in used if not 0 <= slot < self._most_slots]
            if outside:  # the bound is lower than it was
                self._shrink(catalog)
        return self._free

    def _shrink(self, catalog: Catalog) -> None:
        with catalog.changing():
            for page, _, _ in list(catalog.all_pages()):
                if not 0 <= page.slot < self._most_slots:
                    catalog.remove(page.key)
        used = catalog.slots()
        self._free = [slot for slot in range(self._end - 1, -1, -1) if slot not in used]
        self.count = len(used)
        os.ftruncate(self._pages, self._most_slots * self.format.page_bytes)

    def _give_slots(self, slots: list[int]) -> None:
        assert self._free is not None
        known = set(self._free)
        fresh = {slot for slot in slots if 0 <= slot < self._end and slot not in known}
        self._free += sorted(fresh, reverse=True)
        self.count -= len(slots)

    def _check_folder(self) -> None:
        """OSError if the folder is not the one that was opened: somebody has deleted it."""
        here, ours = os.stat(self.folder / _LOCK), os.fstat(self._lock)
        if not os.path.samestat(here, ours):
            raise FileNotFoundError(2, "the folder of the store was replaced", str(self.folder))

    def _drop_old_folders(self, own_bytes: int) -> None:
        """Delete other models' folders, the oldest first, until all of them fit into the bound."""
        others = []
        for folder in folders_in(self._directory):
            if folder.name.partition(".")[0] != self.format.name:
                others.append((folder.stat().st_mtime, size_of(folder), folder))
        total = own_bytes + sum(size for _, size, _ in others)
        for _, size, folder in sorted(others):
            if total <= self._most_bytes:
                break
            if purge(folder):
                total -= size


def folders_in(directory: Path) -> list[Path]:
    """The folders of pages in `directory`."""
    return sorted(at for at in directory.iterdir() if (at / _LOCK).is_file())


def size_of(folder: Path) -> int:
    """Bytes that a folder takes on disk."""
    return sum(at.stat().st_blocks * 512 for at in folder.iterdir())


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Whether the folder is ours within the block; False if a process uses it."""
    lock = os.open(folder / _LOCK, os.O_RDWR)
    try:
        yield _lock(lock)
    finally:
        os.close(lock)


def purge(folder: Path) -> bool:
    """Delete a folder; False, and nothing is deleted, if a process uses it."""
    with locked(folder) as ours:
        if ours:
            shutil.rmtree(folder)
        return ours


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """What is stored in a folder."""

    pages: int
    tokens: int
    bytes: int
    in_use: bool
    damaged: int | None = None
    """Pages that are not what they should be; None: not looked for."""


def look_at(folder: Path, *, verify: bool) -> FolderFacts:
    """Count a folder's pages; with `verify`, read each and delete the damaged ones.

    Nothing is deleted in a folder that a process uses. sqlite3.DatabaseError if the catalogue
    itself cannot be read.
    """
    path = folder / _CATALOG
    with locked(folder) as ours, contextlib.closing(sqlite3.connect(path)) as plain:
        row = plain.execute("SELECT count(*), max(length(tokens)) FROM pages").fetchone()
        page_size = (row[1] or 4) // 4
        stride = plain.execute("SELECT value FROM meta WHERE name = 'stride'").fetchone()
        damaged: int | None = None
        if verify:
            catalog = Catalog(path, page_size, int(bytes(stride[0])))
            with contextlib.closing(catalog):
                damaged = _verify(folder, catalog, delete=ours)
        return FolderFacts(row[0], row[0] * page_size, size_of(folder), not ours, damaged)


def _verify(folder: Path, catalog: Catalog, *, delete: bool) -> int:
    bad = []
    page_bytes = int(catalog.meta("page_bytes") or b"0")
    with open(folder / _PAGES, "rb") as content:
        for page, parent, tokens in catalog.all_pages():
            content.seek(page.slot * page_bytes)
            data = np.frombuffer(content.read(page_bytes), np.uint8)
            sound = _checksum(page.key, data) == page.checksum
            if not sound or (parent is not None and not is_key(page.key, parent, tokens)):
                bad.append(page.key)
    if delete:
        with catalog.changing():
            for key in bad:
                catalog.remove(key)
    return len(bad)


def _lock_a_folder(directory: Path, name: str) -> tuple[Path, int]:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in range(_MOST_FOLDERS):
        folder = directory / f"{name}.{number}"
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        if _lock(lock):
            os.utime(folder)
            return folder, lock
        os.close(lock)
    raise OSError(f"{_MOST_FOLDERS} processes use {directory}")


def _lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _checksum(key: str, content: ByteArray) -> bytes:
    """Of a page's content and its key: equal content of another page has another checksum."""
    return xxhash.xxh3_128_digest(content.data, seed=int(key[:16], 16))


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive slots: where they begin in `slots`, and how many they are."""
    begin = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield begin, at - begin
            begin = at
