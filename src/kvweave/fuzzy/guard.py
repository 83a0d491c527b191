"""Between the engine and somebody else's provider: nothing that it does may cost a request."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from kvweave.fuzzy.provider import Candidate, Donors, FuzzyMatchProvider, PublishedRun
from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import RequestView

_Result = TypeVar("_Result")
_Inbox: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"


class LateError(Exception):
    """The call has not come back yet, or one before it has not."""


class Worker:
    """One thread, one call at a time; its caller always comes back in time.

    A call that is given up on goes on until it ends by itself, and until then every other is late.
    The thread is a daemon: a call that never ends does not keep the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox: _Inbox = SimpleQueue()
        self._last: Future[Any] | None = None
        weakref.finalize(self, self._inbox.put, None)

    def run(self, call: Callable[[], _Result], seconds: float) -> _Result:
        """What `call` returns or raises; LateError after `seconds`."""
        if self._last is None:
            thread = threading.Thread(target=_work, args=(self._inbox,), name=self._name)
            thread.daemon = True
            thread.start()
        elif not self._last.done():
            raise LateError
        future: Future[_Result] = Future()
        self._last = future
        self._inbox.put((future, call))
        try:
            future.exception(seconds)  # waits, and does not raise what the call raised
        except FutureTimeoutError:
            raise LateError from None
        return future.result()


def _work(inbox: _Inbox) -> None:
    while (job := inbox.get()) is not None:
        future, call = job
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del job, future, call  # or they would be kept until the next one comes


_log = logging.getLogger(__name__)


MOST_CANDIDATES = 4096
LATE_IN_A_ROW = 3
FIRST_REST, LONGEST_REST = 1.0, 60.0
"""Seconds for which a provider that is always late is not asked; doubled each time."""
_TOLD_EVERY = 1.0


class LentDonors:
    """The live tree as a provider sees it: there while a call into the provider is waited for.

    A call that was given up on may still run while the engine changes the tree. It is told so, the
    next time that it looks.
    """

    def __init__(self, donors: Donors) -> None:
        self.page_size = donors.page_size
        self.num_pages = donors.num_pages
        self._donors = donors
        self._lock = threading.Lock()
        self._lent = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Whoever has the donors may look at them within."""
        self._lent = True
        try:
            yield
        finally:
            with self._lock:  # after a look that has begun
                self._lent = False

    @property
    def running(self) -> int:
        return self._donors.running

    @property
    def decode(self) -> Callable[[IntArray], str] | None:
        return self._donors.decode

    def start(self, page: int) -> int:
        with self._lock:
            return self._there().start(page)

    def tokens(self, page: int, first: int = 0) -> IntArray:
        with self._lock:
            return self._there().tokens(page, first)

    def run_around(
        self, view: RequestView, position: int, page: int, donor_position: int
    ) -> Candidate | None:
        with self._lock:
            return self._there().run_around(view, position, page, donor_position)

    def _there(self) -> Donors:
        if not self._lent:
            raise RuntimeError("donors can be looked at during a call only, and this one is over")
        return self._donors


class Guard:
    """Calls a provider, and answers for it when it raises, is late, or never comes back.

    A provider that is not `bounded` runs on a thread of its own, and is waited for only so long.
    One that is late several times in a row rests for a while: it is not asked, but still told what
    is cached. Faults are counted, and each kind is logged once.
    """

    def __init__(
        self,
        name: str,
        provider: FuzzyMatchProvider,
        donors: LentDonors,
        budget_ms: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._name = name
        self._provider = provider
        self._donors = donors
        self._worker = None if provider.bounded else Worker(f"fuzzy provider {name}")
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
        self.told: Mapping[str, float] = {}
        """What the provider told of itself when it was asked for donors; renewed once a second, so
        that whoever wants to know it need not ask."""
        self._told_at = float("-inf")

    @property
    def zeroed_layers(self) -> frozenset[int]:
        return self._provider.zeroed_layers

    def match(self, view: RequestView, exact: int) -> list[Candidate]:
        """The provider's candidates, not yet verified; none if it failed in any way."""
        if self._clock() < self._resting_until:
            self.counts["resting"] += 1
            return []
        self.counts["asked"] += 1
        found: list[Candidate] = []
        try:
            found = self._call(lambda: self._asked(view, exact))
        except LateError:
            self._was_late()
            return []
        except Exception:
            self._fault("raised", "failed in match; the request goes on without its help")
        self._late_in_a_row, self._rest = 0, FIRST_REST
        self.counts["proposed"] += len(found)
        return found

    def refuse(self, candidate: object) -> None:
        """The provider proposed something that is not there."""
        self._fault("refused", f"proposed what is not cached there: {candidate!r}")

    def on_published(self, run: PublishedRun) -> None:
        self._tell(lambda: self._provider.on_published(run))

    def on_evicted(self, pages: IntArray) -> None:
        self._tell(lambda: self._provider.on_evicted(pages))

    def clear(self) -> None:
        self._tell(self._provider.clear)

    def settle(self, seconds: float) -> bool:
        """Wait for the provider's background work; False if it goes on."""
        return self._provider.settle(seconds)

    def stats(self) -> dict[str, float]:
        """What the guard counted, and what the provider tells of itself."""
        own: dict[str, float] = {}
        self._tell(lambda: own.update(self._provider.stats()))
        return {**self.counts, **own}

    def _asked(self, view: RequestView, exact: int) -> list[Candidate]:
        """On whichever thread the provider runs."""
        found = list(islice(self._provider.match(view, exact), MOST_CANDIDATES))
        now = self._clock()
        if now - self._told_at >= _TOLD_EVERY:
            self._told_at = now
            with suppress(Exception):  # it comes from elsewhere, and may be anything
                own = self._provider.stats().items()
                self.told = {str(name): float(figure) for name, figure in own}
        return found

    def _call(self, call: Callable[[], _Result]) -> _Result:
        with self._donors.lent():
            return call() if self._worker is None else self._worker.run(call, self._budget)

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            self._call(call)
        except LateError:
            self._fault("late", "did not take in time what it was told; it missed some of it")
        except Exception:
            self._fault("raised", "failed when told what is cached")

    def _was_late(self) -> None:
        self._fault("late", f"took more than the {1000 * self._budget:g} ms that it may take")
        self._late_in_a_row += 1
        if self._late_in_a_row >= LATE_IN_A_ROW:
            # It comes back with one try, not with three.
            self._late_in_a_row = LATE_IN_A_ROW - 1
            self._resting_until = self._clock() + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)

    def _fault(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("fuzzy provider %s %s", self._name, what, exc_info=kind == "raised")
