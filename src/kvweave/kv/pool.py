"""The page pool: counts the owners of each KV page, and hands out free pages.

A page is `page_size` consecutive slots. Its count equals its owners: live leases plus, when a
prefix cache keeps it, the cache itself. Free means zero owners, and only the pool frees. Pages are
numbers here; `kv.tensors` holds their memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvweave.errors import IntegrityError
from kvweave.kv.journal import Journal

IntArray: TypeAlias = npt.NDArray[np.int32]


class PagePool:
    """Hands out pages and counts their owners.

    Not thread-safe: it belongs to the engine's thread. `journal` is shared by all that changes
    together with the pool: a cache, its tree or index.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"a pool needs at least one page of one slot, got {num_pages} x {page_size}"
            )
        self.page_size = page_size
        self.num_pages = num_pages
        self.journal = Journal()
        self._owners = np.zeros(num_pages, np.int32)
        # A stack whose top is its end. Descending: a fresh pool then hands out ascending runs,
        # which attention and copies read as one stream of memory.
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return self._num_free

    def owners(self, page: int) -> int:
        """How many owners `page` has now."""
        return int(self._owners[page])

    def alloc(self, n: int) -> IntArray | None:
        """Take `n` pages, each owned by the caller once; None (and none) if too few are free."""
        if n < 0:
            raise ValueError(f"cannot take {n} pages")
        if n > self._num_free:
            return None
        left = self._num_free - n
        pages = self._free[left : self._num_free][::-1].copy()
        self.journal.fields(self, "_num_free")
        self.journal.items(self._owners, pages)
        self._owners[pages] = 1
        self._num_free = left
        return pages

    def share(self, pages: IntArray) -> None:
        """Add one owner to each of `pages` (distinct, and none of them free)."""
        if len(pages) and int(self._owners[pages].min()) < 1:
            raise IntegrityError("a free page was shared")
        self.journal.items(self._owners, pages)
        self._owners[pages] += 1

    def drop(self, pages: IntArray) -> int:
        """Take one owner from each of `pages` (distinct); those left with none are free again.

        Returns how many became free. The head of `pages` is handed out again before its tail.
        """
        if not len(pages):
            return 0
        owners = self._owners[pages] - 1
        if int(owners.min()) < 0:
            raise IntegrityError("a page was dropped that its caller does not own")
        freed = pages[owners == 0][::-1]
        room = slice(self._num_free, self._num_free + len(freed))
        self.journal.fields(self, "_num_free")
        self.journal.items(self._owners, pages)
        self.journal.items(self._free, room)
        self._owners[pages] = owners
        self._free[room] = freed
        self._num_free += len(freed)
        return len(freed)

    def check(self, owned: Iterable[IntArray]) -> None:
        """Prove the accounting: `owned` lists, once per owner, the pages that owner holds.

        Raises IntegrityError naming what does not add up.
        """
        expected = np.zeros(self.num_pages, np.int64)
        for pages in owned:
            expected += np.bincount(pages, minlength=self.num_pages)
        wrong = np.flatnonzero(expected != self._owners)
        if len(wrong):
            page = int(wrong[0])
            raise IntegrityError(
                f"{len(wrong)} pages have wrong owner counts, the first is page {page}: "
                f"counted {int(self._owners[page])}, found {int(expected[page])}"
            )
        free = self._free[: self._num_free]
        if len(np.unique(free)) != len(free) or (len(free) and int(self._owners[free].max()) > 0):
            raise IntegrityError("the free list holds a page twice, or one that has an owner")
        if self._num_free + int(np.count_nonzero(self._owners)) != self.num_pages:
            raise IntegrityError(
                f"{self._num_free} free and {int(np.count_nonzero(self._owners))} owned pages "
                f"do not make {self.num_pages}"
            )


def runs_of(numbers: IntArray) -> tuple[tuple[int, int], ...]:
    """Positions, slots or pages as runs of consecutive ones, in their order: (first, count)."""
    if not len(numbers):
        return ()
    ends = np.flatnonzero(np.diff(numbers) != 1)
    firsts = numbers[np.concatenate(([0], ends + 1))]
    counts = np.diff(np.concatenate(([-1], ends, [len(numbers) - 1])))
    return tuple(zip(firsts.tolist(), counts.tolist(), strict=True))
