"""Between the engine and somebody else's provider: nothing that it does may cost a request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import islice
from typing import TypeVar

from kvweave.fuzzy.provider import Candidate, FuzzyMatchProvider, PublishedRun
from kvweave.kv.pool import IntArray
from kvweave.prefix.base import RequestView

_log = logging.getLogger(__name__)

_Argument = TypeVar("_Argument")

MOST_CANDIDATES = 4096
LATE_IN_A_ROW = 3
FIRST_REST, LONGEST_REST = 1.0, 60.0
"""Seconds for which a provider that is always late is not asked; doubled each time."""


class Guard:
    """Calls a provider, and answers for it when it raises or is late.

    A late answer is thrown away, though it is there: that shows early what an overload would show
    later, and who finds a provider worth waiting for says so with its budget. A provider that is
    late several times in a row rests for a while: it is not asked, but still told what is cached.
    Every kind of fault is logged once and always counted.
    """

    def __init__(
        self,
        name: str,
        provider: FuzzyMatchProvider,
        budget_ms: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._name = name
        self._provider = provider
        self._budget = budget_ms / 1000
        self._clock = clock
        self._late_in_a_row = 0
        self._rest = FIRST_REST
        self._resting_until = float("-inf")
        self._logged: set[str] = set()
        self.counts = dict.fromkeys(
            ("asked", "resting", "raised", "late", "proposed", "refused"), 0
        )
        """Calls that were made, left out, raised and late; candidates proposed, and refused."""

    @property
    def zeroed_layers(self) -> frozenset[int]:
        return self._provider.zeroed_layers

    def match(self, view: RequestView, exact: int) -> list[Candidate]:
        """The provider's candidates, not yet verified; none if it failed in any way."""
        began = self._clock()
        if began < self._resting_until:
            self.counts["resting"] += 1
            return []
        self.counts["asked"] += 1
        try:
            found = list(islice(self._provider.match(view, exact), MOST_CANDIDATES))
        except Exception:
            self._fault("raised", "failed in match; the request goes on without its help")
            return []
        if self._was_late(began):
            return []
        self.counts["proposed"] += len(found)
        return found

    def refuse(self, candidate: object) -> None:
        """The provider proposed something that is not there."""
        self._fault("refused", f"proposed what is not cached there: {candidate}")

    def on_published(self, run: PublishedRun) -> None:
        self._tell(self._provider.on_published, run)

    def on_evicted(self, pages: IntArray) -> None:
        self._tell(self._provider.on_evicted, pages)

    def clear(self) -> None:
        self._tell(lambda _: self._provider.clear(), None)

    def stats(self) -> dict[str, float]:
        """What the guard counted, and what the provider tells of itself."""
        try:
            return {**self.counts, **self._provider.stats()}
        except Exception:
            self._fault("raised", "failed in stats")
            return dict(self.counts)

    def _tell(self, told: Callable[[_Argument], None], what: _Argument) -> None:
        try:
            told(what)
        except Exception:
            self._fault("raised", "failed when told what is cached")

    def _was_late(self, began: float) -> bool:
        now = self._clock()
        if now - began <= self._budget:
            self._late_in_a_row, self._rest = 0, FIRST_REST
            return False
        self._fault("late", f"took {now - began:.3f} s of the {self._budget:.3f} s it may take")
        self._late_in_a_row += 1
        if self._late_in_a_row >= LATE_IN_A_ROW:
            # It comes back with one try, not with three.
            self._late_in_a_row = LATE_IN_A_ROW - 1
            self._resting_until = now + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
        return True

    def _fault(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("fuzzy provider %s %s", self._name, what, exc_info=kind == "raised")
