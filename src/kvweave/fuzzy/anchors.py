"""The span index, the built-in provider, and the hash table of its anchors.

An anchor leads from the hash of a window of tokens to the slots where such windows end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvweave.config import FuzzyConfig
from kvweave.errors import IntegrityError
from kvweave.fuzzy.matcher import (
    PLACES_TRIED,
    HashArray,
    Offsets,
    RunT,
    anchors_of,
    runs_through,
    window_hashes,
)
from kvweave.fuzzy.provider import Candidate, Donors, FuzzyMatchProvider, PublishedRun
from kvweave.kv.pool import IntArray
from kvweave.prefix.hash_index import namespace_seed
from kvweave.prefix.lease import RequestView

_NONE = -1


class AnchorTable:
    """A hash table with chained buckets, in numpy arrays; an anchor is an index into them.

    `num_slots` sizes the buckets once: the table is never rehashed, so no request waits for that.
    """

    def __init__(self, num_slots: int, page_size: int, stride: int) -> None:
        self._page_size = page_size
        expected = max(num_slots // stride, 32)
        self._bits = expected.bit_length()  # one to two buckets for every anchor of a full pool
        self._heads = np.full(1 << self._bits, _NONE, np.int32)
        self._first_on_page = np.full(-(-num_slots // page_size), _NONE, np.int32)
        self._hash = np.zeros(0, np.uint64)
        self._slot = np.zeros(0, np.int32)
        self._next = np.zeros(0, np.int32)
        """Next in the bucket, for the newest anchor of a hash; next free, for those not in use."""
        self._newer = np.zeros(0, np.int32)
        self._older = np.zeros(0, np.int32)
        self._beside = np.zeros(0, np.int32)
        """Another anchor of the same page."""
        self._free = _NONE
        self._count = 0
        self._make_room(expected)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Memory of the whole table."""
        return self._heads.nbytes + self._first_on_page.nbytes + sum(a.nbytes for a in self._fields)

    # Asking.

    def probe(self, hashes: HashArray) -> tuple[Offsets, IntArray]:
        """Indices of the `hashes` that have anchors, ascending, and the newest anchor of each."""
        anchors = self._heads[(hashes >> np.uint64(64 - self._bits)).view(np.int64)]
        at = np.flatnonzero(anchors >= 0)
        anchors, found = anchors[at], np.full(len(hashes), _NONE, np.int32)
        while len(at):
            same = self._hash[anchors] == hashes[at]
            found[at[same]] = anchors[same]
            anchors = self._next[anchors]
            left = ~same & (anchors >= 0)
            at, anchors = at[left], anchors[left]
        at = np.flatnonzero(found >= 0)
        return at, found[at]

    def slots(self, anchor: int, limit: int) -> list[int]:
        """Up to `limit` slots with the hash of `anchor`, a newest one; newest first."""
        slots: list[int] = []
        while anchor >= 0 and len(slots) < limit:
            slots.append(self._slots[anchor])
            anchor = self._olders[anchor]
        return slots

    def longest_run(
        self, anchor: int, offset: int, run_at: Callable[[int], RunT | None]
    ) -> RunT | None:
        """The longest run that covers `offset`, of those through the newest places of `anchor`.

        `run_at(slot)` gives the run through a place, or None if the tokens there differ.
        """
        best: RunT | None = None
        for slot in self.slots(anchor, PLACES_TRIED):
            run = run_at(slot)
            if run is not None and run.start <= offset and (not best or run.length > best.length):
                best = run
        return best

    # Changing.

    def open(self, hashes: HashArray, slots: IntArray) -> None:
        """Add an anchor per hash, to the slot of its window's last token."""
        while self._count + len(hashes) > len(self._hash):
            self._make_room(2 * len(self._hash))
        for hash_, slot in zip(hashes.tolist(), slots.tolist(), strict=True):
            self._open(hash_, slot)

    def close(self, pages: IntArray) -> None:
        """Remove every anchor to `pages`."""
        first = self._first_on_page[pages]
        for anchor in first[first >= 0].tolist():
            while anchor >= 0:
                beside = self._besides[anchor]
                self._close(anchor)
                anchor = beside
        self._first_on_page[pages] = _NONE

    def clear(self) -> None:
        """Remove every anchor."""
        self._heads.fill(_NONE)
        self._first_on_page.fill(_NONE)
        self._count = 0
        self._chain_free(0)

    def _open(self, hash_: int, slot: int) -> None:
        anchor = self._free
        self._free = self._nexts[anchor]
        self._hashes[anchor], self._slots[anchor] = hash_, slot
        page = slot // self._page_size
        self._besides[anchor] = self._firsts[page]
        self._firsts[page] = anchor
        bucket = hash_ >> (64 - self._bits)
        before, twin = _NONE, self._head[bucket]
        while twin >= 0 and self._hashes[twin] != hash_:
            before, twin = twin, self._nexts[twin]
        self._newers[anchor], self._olders[anchor] = _NONE, twin
        if twin >= 0:
            self._newers[twin] = anchor
            self._nexts[anchor] = self._nexts[twin]
            self._link(bucket, before, anchor)
        else:
            self._nexts[anchor] = self._head[bucket]
            self._head[bucket] = anchor
        self._count += 1

    def _close(self, anchor: int) -> None:
        newer, older = self._newers[anchor], self._olders[anchor]
        if older >= 0:
            self._newers[older] = newer
        if newer >= 0:
            self._olders[newer] = older
        else:  # the newest of its hash stands in the bucket: the next older one takes its place
            bucket = self._hashes[anchor] >> (64 - self._bits)
            before, at = _NONE, self._head[bucket]
            while at != anchor:
                before, at = at, self._nexts[at]
            if older >= 0:
                self._nexts[older] = self._nexts[anchor]
            self._link(bucket, before, older if older >= 0 else self._nexts[anchor])
        self._nexts[anchor] = self._free
        self._free = anchor
        self._count -= 1

    def _link(self, bucket: int, before: int, anchor: int) -> None:
        if before >= 0:
            self._nexts[before] = anchor
        else:
            self._head[bucket] = anchor

    def _make_room(self, capacity: int) -> None:
        used = len(self._hash)
        self._hash, self._slot, self._next, self._newer, self._older, self._beside = (
            np.concatenate((field, np.zeros(capacity - used, field.dtype)))
            for field in self._fields
        )
        # Reading and writing single numbers is several times cheaper through these.
        self._head, self._firsts = self._heads.data, self._first_on_page.data
        self._hashes, self._slots = self._hash.data, self._slot.data
        self._nexts, self._besides = self._next.data, self._beside.data
        self._newers, self._olders = self._newer.data, self._older.data
        self._chain_free(used)

    def _chain_free(self, first: int) -> None:
        """All anchors from `first` on are free, and come before those that are free already."""
        self._next[first:] = np.arange(first + 1, len(self._next) + 1)
        self._next[-1] = self._free if first else _NONE
        self._free = first

    @property
    def _fields(self) -> tuple[npt.NDArray[np.uint64] | IntArray, ...]:
        return self._hash, self._slot, self._next, self._newer, self._older, self._beside

    # Proving.

    def check(self) -> None:
        """Walk every bucket, ring and page; IntegrityError where they hold different anchors."""
        in_rings: set[int] = set()
        for bucket in np.flatnonzero(self._heads >= 0).tolist():
            at = self._head[bucket]
            while at >= 0:
                if self._hashes[at] >> (64 - self._bits) != bucket or self._newers[at] != _NONE:
                    raise IntegrityError(f"anchor {at} stands in a bucket where it does not belong")
                in_rings.update(self._ring(at))
                at = self._nexts[at]
        on_pages: set[int] = set()
        for page in np.flatnonzero(self._first_on_page >= 0).tolist():
            anchor = self._firsts[page]
            while anchor >= 0:
                if self._slots[anchor] // self._page_size != page:
                    raise IntegrityError(
                        f"anchor {anchor} is filed under a page that is not its own"
                    )
                on_pages.add(anchor)
                anchor = self._besides[anchor]
        if in_rings != on_pages or len(in_rings) != self._count:
            raise IntegrityError(
                f"of {self._count} anchors, {len(in_rings)} can be found by hash "
                f"and {len(on_pages)} by page"
            )

    def _ring(self, newest: int) -> list[int]:
        ring, anchor = [newest], self._olders[newest]
        while anchor >= 0:
            if self._hashes[anchor] != self._hashes[newest] or self._newers[anchor] != ring[-1]:
                raise IntegrityError(f"anchor {anchor} hangs in a ring where it does not belong")
            ring.append(anchor)
            anchor = self._olders[anchor]
        return ring


class SpanIndex(FuzzyMatchProvider):
    """Finds runs of a prompt that are cached anywhere, at any shift, from any number of donors."""

    bounded = True

    def __init__(self, donors: Donors, config: FuzzyConfig) -> None:
        super().__init__(donors, config)
        self._stride = config.stride
        self._seconds = config.time_budget_ms / 2000  # half of what a request may wait
        self.anchors = AnchorTable(
            donors.num_pages * donors.page_size, donors.page_size, self._stride
        )

    def match(self, view: RequestView, exact: int) -> Sequence[Candidate]:
        seed = namespace_seed(view.namespace)
        offsets, anchors = self.anchors.probe(
            window_hashes(view.tokens[exact:], self._stride, seed)
        )
        offsets += exact

        def longest_at(hit: int) -> Candidate | None:
            return self._longest(view, int(offsets[hit]), int(anchors[hit]))

        return runs_through(offsets, self._stride, longest_at, self._seconds)

    def _longest(self, view: RequestView, offset: int, anchor: int) -> Candidate | None:
        """The longest run through the window at `offset`, among the newest places of its text."""

        def run_at(slot: int) -> Candidate | None:
            page, within = divmod(slot, self.donors.page_size)
            last = offset + self._stride - 1
            return self.donors.run_around(view, last, page, self.donors.start(page) + within)

        return self.anchors.longest_run(anchor, offset, run_at)

    def on_published(self, run: PublishedRun) -> None:
        size, stride = self.donors.page_size, self._stride
        first = run.start // stride * stride  # the first window that ends in the run begins here
        if run.start + len(run.tokens) < first + stride:
            return
        tokens = run.tokens
        if first < run.start:
            tokens = self.donors.tokens(int(run.pages[-1]), first)
        seed = namespace_seed(run.namespace)
        hashes, ends = anchors_of(tokens, first, run.start, stride, seed)
        ends -= run.start
        self.anchors.open(hashes, (run.pages[ends // size] * size + ends % size).astype(np.int32))

    def on_evicted(self, pages: IntArray) -> None:
        self.anchors.close(pages)

    def clear(self) -> None:
        self.anchors.clear()

    def stats(self) -> Mapping[str, float]:
        return {"anchors": len(self.anchors), "bytes": self.anchors.nbytes}
