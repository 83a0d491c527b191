"""The catalogue of a folder of stored pages: which text's KV lies in which slot, in SQLite.

A page's key is a keyed hash of its tokens and of its parent's key. The first parent, the root,
stands for the namespace and for the format of the pages: what was computed by another model, with
another salt, or in another layout has other keys. Neither namespace nor salt is stored.

Every row is checked against its key before it is used, so that a damaged catalogue loses pages and
serves no wrong ones. Damage that SQLite notices raises sqlite3.DatabaseError.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from kvweave.fuzzy.matcher import (
    PLACES_TRIED,
    anchors_of,
    run_around,
    runs_through,
    window_hashes,
)
from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Namespace
from kvweave.prefix.tree import common_prefix

VERSION = "1"
"""Of keys, tables and the form of a page; another version's catalogue is not read."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, parent INTEGER NOT NULL,
    depth INTEGER NOT NULL, slot INTEGER NOT NULL, checksum BLOB NOT NULL, tokens BLOB NOT NULL,
    used INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS pages_parent ON pages (parent);
CREATE INDEX IF NOT EXISTS pages_used ON pages (used, depth DESC);
CREATE TABLE IF NOT EXISTS anchors (hash INTEGER, page INTEGER, PRIMARY KEY (hash, page))
    WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS anchors_page ON anchors (page);
"""
_MOST_HITS = 20_000
"""Places of a prompt's windows that are looked at; periodic text has very many."""


@dataclass(frozen=True, slots=True)
class StoredPage:
    """Where a page's content lies, and what it must be."""

    key: str
    slot: int
    checksum: bytes


@dataclass(frozen=True, slots=True, eq=False)
class StoredPath:
    """Stored pages from the beginning of a text on, of which a prompt can use `gain` tokens.

    `tokens` (int32) are those of `pages`.
    """

    tokens: IntArray
    pages: Sequence[StoredPage]
    gain: int


class Catalog:
    """One thread's connection to a catalogue; several threads each open their own."""

    def __init__(self, path: Path, page_size: int, stride: int) -> None:
        """Opens the catalogue, made if need be. sqlite3.Error or OSError where that fails."""
        self.page_size = page_size
        self._stride = stride
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # what SQLite adds is so too
        self._db = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA)
        with self.changing():
            version = self._meta("version", VERSION.encode())
            self._secret = self._meta("secret", secrets.token_bytes(32))
            anchored = self._meta("stride", str(stride).encode())
            if anchored != str(stride).encode():
                self._db.execute("DELETE FROM anchors")  # those of another stride find nothing
                self.set_meta("stride", str(stride).encode())
        if version != VERSION.encode() or len(self._secret) != 32:
            raise sqlite3.DatabaseError(f"a catalogue of version {version!r}")

    def close(self) -> None:
        self._db.close()

    def changing(self) -> sqlite3.Connection:
        """A transaction, to be used in a `with` statement: all of it happens, or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        return self._db

    def meta(self, name: str) -> bytes | None:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else bytes(row[0])

    def set_meta(self, name: str, value: bytes) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def _meta(self, name: str, default: bytes) -> bytes:
        found = self.meta(name)
        if found is None:
            self.set_meta(name, default)
        return default if found is None else found

    # Keys.

    def root(self, namespace: Namespace, page_format: str) -> str:
        """The parent key of first pages."""
        root = hashlib.blake2b(key=self._secret, digest_size=16)
        for part in (VERSION, page_format, *astuple(namespace)):
            data = b"" if part is None else b"=" + part.encode("utf-8", "surrogatepass")
            root.update(len(data).to_bytes(8, "little") + data)
        return root.hexdigest()

    def keys(self, root: str, tokens: IntArray) -> list[str]:
        """The key of each whole page of `tokens`, which begin a text."""
        data, step = tokens.tobytes(), self.page_size * tokens.itemsize
        keys: list[str] = []
        for at in range(0, len(data) - step + 1, step):
            keys.append(_key(root if not keys else keys[-1], data[at : at + step]))
        return keys

    # Finding.

    def prefix(self, root: str, tokens: IntArray) -> list[StoredPage]:
        """The longest stored prefix of `tokens`, in whole pages."""
        keys = self.keys(root, tokens)
        rows = self._db.execute(
            "SELECT pages.key, slot, checksum FROM json_each(?) AS wanted "
            "CROSS JOIN pages ON pages.key = wanted.value",
            (json.dumps(keys),),
        )
        found = {key: StoredPage(key, slot, checksum) for key, slot, checksum in rows}
        pages = []
        for key in keys:
            if key not in found:
                break
            pages.append(found[key])
        return pages

    def spans(
        self, root: str, tokens: IntArray, begin: int, shortest: int, seconds: float
    ) -> list[StoredPath]:
        """Stored paths that hold runs of `tokens[begin:]`, at least `shortest` tokens, anywhere."""
        windows = window_hashes(tokens[begin:], self._stride, _seed(root)).view(np.int64)
        rows = self._db.execute(
            "SELECT wanted.key, anchors.page FROM json_each(?) AS wanted "
            "CROSS JOIN anchors ON anchors.hash = wanted.value LIMIT ?",
            (json.dumps(windows.tolist()), _MOST_HITS),
        ).fetchall()
        places: dict[int, list[int]] = {}
        for offset, page in rows:  # pages ascend: the newest comes last
            places.setdefault(int(offset) + begin, []).append(page)
        offsets = np.array(sorted(places), np.intp)
        paths: dict[int, _Path | None] = {}

        def longest_at(hit: int) -> _StoredRun | None:
            offset, best = int(offsets[hit]), None
            for page in places[offset][: -PLACES_TRIED - 1 : -1]:
                if page not in paths:
                    paths[page] = self._path(root, page)
                path = paths[page]
                run = None if path is None else self._run(path, tokens, offset)
                if run is not None and (best is None or run.length > best.length):
                    best = run
            return best

        runs = runs_through(offsets, self._stride, longest_at, seconds)
        return _merged([run for run in runs if run.length >= shortest], self.page_size)

    def _run(self, path: _Path, tokens: IntArray, offset: int) -> _StoredRun | None:
        """The run through the window at `offset`, whose last token lies on the path's last page."""
        last = offset + self._stride - 1
        size = self.page_size
        seed = np.flatnonzero(path.tokens[-size:] == tokens[last])
        best: _StoredRun | None = None
        for within in seed.tolist():
            run = run_around(tokens, last, path.tokens, len(path.tokens) - size + within)
            if run.length >= self._stride and (best is None or run.length > best.length):
                best = _StoredRun(run.start, run.length, run.donor_start, path)
        return None if best is None else self._onward(best, tokens)

    def _onward(self, run: _StoredRun, tokens: IntArray) -> _StoredRun:
        """`run`, and what of it continues in the pages behind its path."""
        while run.donor_start + run.length == len(run.path.tokens):
            rest = tokens[run.start + run.length :]
            children = self._db.execute(
                "SELECT id, key, slot, checksum, tokens FROM pages WHERE parent = ? LIMIT 16",
                (run.path.last,),
            ).fetchall()
            best, longest = None, 0
            for child in children:
                if not self._is_text(child[4]):
                    continue
                same = common_prefix(_tokens(child[4]), rest)
                if same > longest and _key(run.path.pages[-1].key, child[4]) == child[1]:
                    best, longest = child, same
            if best is None:
                break
            path = _Path(
                best[0],
                np.concatenate([run.path.tokens, _tokens(best[4])]),
                [*run.path.pages, StoredPage(*best[1:4])],
            )
            run = _StoredRun(run.start, run.length + longest, run.donor_start, path)
        return run

    def _path(self, root: str, page: int) -> _Path | None:
        """All pages up to `page`; None unless they are a path of that namespace."""
        rows = self._db.execute(
            "WITH RECURSIVE up (id, parent) AS (SELECT id, parent FROM pages WHERE id = ? "
            "UNION SELECT pages.id, pages.parent FROM pages JOIN up ON pages.id = up.parent) "
            "SELECT pages.key, slot, checksum, tokens FROM up JOIN pages USING (id) ORDER BY depth",
            (page,),
        ).fetchall()
        key = root
        for row in rows:
            if not self._is_text(row[3]) or _key(key, row[3]) != row[0]:
                return None
            key = row[0]
        if not rows:
            return None
        tokens = _tokens(b"".join(row[3] for row in rows))
        return _Path(page, tokens, [StoredPage(*row[:3]) for row in rows])

    def _is_text(self, data: object) -> bool:
        """Whether this is a page's tokens: damage can change a value's type, too."""
        return isinstance(data, bytes) and len(data) == 4 * self.page_size

    # Changing: within `changing`, by one thread.

    def touch(self, pages: Iterable[StoredPage]) -> None:
        """A path is used now: it goes last."""
        now = self._now()
        self._db.executemany(
            "UPDATE pages SET used = ? WHERE key = ?", ((now, page.key) for page in pages)
        )

    def add(
        self, root: str, tokens: IntArray, first: int, places: Sequence[tuple[int, bytes]]
    ) -> None:
        """Pages `first` and on of the text `tokens` are in `places` (slot, checksum) now."""
        size, now = self.page_size, self._now()
        keys = self.keys(root, tokens[: (first + len(places)) * size])
        parent = self._id(keys[first - 1]) if first else 0
        ids = []
        for depth, (slot, checksum) in enumerate(places, first):
            text = tokens[depth * size : (depth + 1) * size].tobytes()
            row = (keys[depth], parent, depth, slot, checksum, text, now)
            added = self._db.execute(
                "INSERT INTO pages (key, parent, depth, slot, checksum, tokens, used) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            parent = int(added.lastrowid or 0)
            ids.append(parent)
        start, stride = first * size, self._stride
        begin = start // stride * stride
        hashes, ends = anchors_of(
            tokens[begin : start + len(ids) * size], begin, start, stride, _seed(root)
        )
        self._db.executemany(
            "INSERT OR IGNORE INTO anchors VALUES (?, ?)",
            (
                (name, ids[end // size - first])
                for name, end in zip(hashes.view(np.int64).tolist(), ends.tolist(), strict=True)
            ),
        )

    def _id(self, key: str) -> int:
        row = self._db.execute("SELECT id FROM pages WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise LookupError("the path goes on behind a page that is not stored any more")
        return int(row[0])

    def evict(self, count: int) -> list[int]:
        """Forget up to `count` pages, the least recently used first; returns their slots."""
        rows = self._db.execute(
            "SELECT id, slot FROM pages ORDER BY used, depth DESC LIMIT ?", (count,)
        ).fetchall()
        self._drop([row[0] for row in rows])
        return [row[1] for row in rows]

    def remove(self, key: str) -> list[int]:
        """Forget a page and what continues it; returns their slots."""
        rows = self._db.execute(
            "WITH RECURSIVE down (id) AS (SELECT id FROM pages WHERE key = ? "
            "UNION SELECT pages.id FROM pages JOIN down ON pages.parent = down.id) "
            "SELECT pages.id, slot FROM pages JOIN down USING (id)",
            (key,),
        ).fetchall()
        self._drop([row[0] for row in rows])
        return [row[1] for row in rows]

    def _drop(self, ids: list[int]) -> None:
        self._db.executemany("DELETE FROM anchors WHERE page = ?", ((page,) for page in ids))
        self._db.executemany("DELETE FROM pages WHERE id = ?", ((page,) for page in ids))

    def _now(self) -> int:
        """Later than everything that was used before, whatever the clock says."""
        (last,) = self._db.execute("SELECT max(used) FROM pages").fetchone()
        return max(time.time_ns(), (last or 0) + 1)

    # Looking at all of it.

    def slots(self) -> set[int]:
        """The slots that hold pages."""
        return {row[0] for row in self._db.execute("SELECT slot FROM pages")}

    def count(self) -> int:
        """Pages."""
        (count,) = self._db.execute("SELECT count(*) FROM pages").fetchone()
        return int(count)

    def all_pages(self) -> Iterator[tuple[StoredPage, str | None, bytes]]:
        """Every page, with the key of its parent (None for a first page) and its tokens."""
        with closing(
            self._db.execute(
                "SELECT at.key, at.slot, at.checksum, above.key, at.tokens FROM pages AS at "
                "LEFT JOIN pages AS above ON at.parent = above.id ORDER BY at.slot"
            )
        ) as rows:
            for key, slot, checksum, parent, tokens in rows:
                yield StoredPage(key, slot, checksum), parent, tokens


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    last: int
    """The id of its last page."""
    tokens: IntArray
    pages: list[StoredPage]


@dataclass(frozen=True, slots=True, eq=False)
class _StoredRun:
    start: int
    length: int
    donor_start: int
    path: _Path


def _key(parent: str, tokens: bytes) -> str:
    return hashlib.blake2b(tokens, key=bytes.fromhex(parent), digest_size=16).hexdigest()


def is_key(key: str, parent: str, tokens: bytes) -> bool:
    """Whether a page of `tokens` behind `parent` has this key."""
    return _key(parent, tokens) == key


def _seed(root: str) -> int:
    """Of the windows' hashes in a namespace."""
    return int(root[:16], 16)


def _tokens(data: bytes) -> IntArray:
    return np.frombuffer(data, np.int32)


def _merged(runs: Iterable[_StoredRun], page_size: int) -> list[StoredPath]:
    """The paths of `runs`, cut behind them; one for those that lie on one path."""
    paths: list[tuple[IntArray, list[StoredPage], int]] = []
    for run in sorted(runs, key=lambda run: -(run.donor_start + run.length)):
        count = -(-(run.donor_start + run.length) // page_size)
        pages = run.path.pages[:count]
        for at, (tokens, longer, gain) in enumerate(paths):
            if longer[count - 1].key == pages[-1].key:
                paths[at] = tokens, longer, gain + run.length
                break
        else:
            paths.append((run.path.tokens[: count * page_size], pages, run.length))
    return [StoredPath(*path) for path in paths]
