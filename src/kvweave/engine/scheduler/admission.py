"""Whether a waiting request may start now: there is room, and nobody is computing its prefix."""

from __future__ import annotations

from collections.abc import Iterable

from kvweave.engine.scheduler.request import Sequence
from kvweave.prefix.contract import PrefixCache

_RESERVE_START, _RESERVE_LEAST, _RESERVE_RAISE, _RESERVE_DECAY = 0.3, 0.1, 0.2, 0.99
_LONGEST_RESERVE = 4096
"""Output tokens beyond these are not reserved for: few answers get there."""

_STALL_STEPS = 64
"""Steps, beside four per slot of a page, to wait for a producer that makes no progress."""


class Admission:
    """Keeps room for what runs, and keeps requests from computing what others are computing.

    Room: a sequence starts if the pages of its own tokens are there, beside those that running ones
    still need and a share of what they all may generate. The share rises with every preemption and
    decays with every step, so that preemptions stay rare without leaving memory idle.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._page_size = cache.page_size
        self._share = _RESERVE_START
        self._stall_limit = _STALL_STEPS + 4 * cache.page_size

    def stepped(self) -> None:
        self._share = max(_RESERVE_LEAST, self._share * _RESERVE_DECAY)

    def preempted(self) -> None:
        self._share = min(1.0, self._share + _RESERVE_RAISE)

    def may_fit(
        self, sequence: Sequence, matched: int, running: Iterable[Sequence], freed: int = 0
    ) -> bool:
        """Whether leasing is worth a try beside `running`, once `freed` more pages are free.

        An estimate: it is not known yet which pages the match consists of.
        """
        surplus = self._room() + freed - self._needed(sequence, matched // self._page_size, running)
        return surplus >= sequence.surplus_needed

    def lacking(self, sequence: Sequence, running: Iterable[Sequence]) -> int:
        """Pages missing for the leased `sequence` to stay beside `running`; 0 or less if it can."""
        assert sequence.lease is not None
        return self._needed(sequence, len(sequence.lease.pages), running) - self._room()

    def refused(
        self, sequence: Sequence, matched: int, running: Iterable[Sequence], lacking: int
    ) -> None:
        """Do not lease `sequence` again before `lacking` more pages are there.

        It had matched pages that nobody else was using: they counted as room before it took them.
        """
        surplus = self._room() - self._needed(sequence, matched // self._page_size, running)
        sequence.surplus_needed = surplus + lacking

    def awaits_producer(self, sequence: Sequence, matched: int) -> bool:
        """Whether a running request is about to publish more of this prefix than is cached.

        Bounded: once the producer has published nothing new for long, the sequence goes ahead.
        """
        group = sequence.group
        if group.running and not group.prompt_computed:
            return True  # a sibling is computing the very same prompt
        promised = self._cache.pending_prefix(sequence.view(), matched)
        if promised <= matched:
            return False
        if matched > sequence.best_match:
            sequence.best_match = matched
            sequence.stalled = 0
        sequence.stalled += 1
        return sequence.stalled <= self._stall_limit

    def _room(self) -> int:
        return self._cache.pool.num_free + self._cache.evictable_pages

    def _needed(self, sequence: Sequence, held: int, running: Iterable[Sequence]) -> int:
        """Pages that must be free or evictable for `sequence`, which holds `held`, to run."""
        needed = self._pages(sequence.length + 1) - held + self._reserve(sequence)
        for other in running:
            if other.lease is not None and other is not sequence:
                needed += max(0, self._pages(other.length) - len(other.lease.pages))
                needed += self._reserve(other)
        return needed

    def _reserve(self, sequence: Sequence) -> int:
        to_come = min(sequence.limit - sequence.length, _LONGEST_RESERVE)
        return self._pages(int(to_come * self._share))

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)
