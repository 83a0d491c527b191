"""Isolates the engine from a provider: its exceptions, its delays and its data."""

from __future__ import annotations

import logging
import math
import operator
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from kvweave.fuzzy.donors import read_only
from kvweave.fuzzy.provider import Candidate, Donors, FuzzyMatchProvider, PublishedRun
from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import RequestView, Tier

_Result = TypeVar("_Result")
_Inbox: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"


class LateError(Exception):
    """The call has not returned in time, or an earlier one has not returned yet."""


def contained(call: Callable[[], _Result]) -> _Result:
    """The result of foreign code, whose exceptions are all `Exception`s.

    Others would end the thread: asyncio.CancelledError, SystemExit, a panic in Rust. They become
    RuntimeError. Ctrl-C in the main thread comes from the user and passes.
    """
    try:
        return call()
    except Exception:
        raise
    except BaseException as error:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and isinstance(error, KeyboardInterrupt):
            raise
        raise RuntimeError(f"raised {type(error).__name__}") from error


class Worker:
    """One thread that runs one call at a time, with a time limit for the caller.

    A call that exceeds its limit goes on until it ends by itself; until then every further call is
    late. The thread is a daemon: a call that never ends does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox: _Inbox = SimpleQueue()
        self._last: Future[Any] | None = None
        weakref.finalize(self, self._inbox.put, None)

    def run(self, call: Callable[[], _Result], seconds: float) -> _Result:
        """What `call` returns or raises, `contained`; LateError after `seconds`."""
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
            future.set_result(contained(call))
        except Exception as error:
            future.set_exception(error)
        del job, future, call  # or they would live until the next job


_log = logging.getLogger(__name__)


MOST_CANDIDATES = 4096
LATE_IN_A_ROW = 3
FIRST_REST, LONGEST_REST = 1.0, 60.0
"""Seconds for which a provider that is late several times in a row is not asked; doubled each time.
"""
TELLING_SHARE = 0.05
"""Share of all time that `on_published` and `on_evicted` may take in the long run."""
_STATS_PERIOD = 1.0


class LentDonors:
    """The live tree as a provider sees it, usable only while a call into the provider is awaited.

    A call that exceeded its time limit may still run while the engine changes the tree. Its next
    access raises RuntimeError.
    """

    def __init__(self, donors: Donors) -> None:
        self.page_size = donors.page_size
        self.num_pages = donors.num_pages
        self._donors = donors
        self._lock = threading.Lock()
        self._lent = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Access is allowed inside."""
        self._lent = True
        try:
            yield
        finally:
            with self._lock:  # waits for an access that has begun
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


class _Proposals(NamedTuple):
    """What a provider answered to `match`, in types of our own."""

    candidates: list[Candidate]
    invalid: list[str]
    """Why the others are no candidates."""
    zeroed_layers: frozenset[int]
    stats: dict[str, float] | None
    """None if they were not due."""


class Guard:
    """Calls a provider. Whatever the provider does costs at most the reuse of one request.

    A provider that is not `bounded` runs on a thread of its own, with a time limit. After several
    late answers in a row it is not asked for a while. Telling it of the cache may take a burst
    of one time limit and a small share of all time; beyond that, publications are not told and
    evictions are told later. Faults are counted, and the first of each kind is logged.
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
        self._telling = _Allowance(self._budget, clock)
        self._evicted: list[IntArray] = []
        """Evicted pages that the provider has not been told of yet."""
        self._logged: set[str] = set()
        self.zeroed_layers: frozenset[int] = frozenset()
        """The layers to zero in what the last `match` proposed."""
        self.counts = dict.fromkeys(
            ("asked", "resting", "raised", "late", "proposed", "refused"), 0
        )
        """Questions asked; questions and publications left out; exceptions; late calls; candidates
        proposed and refused."""
        self.told: Mapping[str, float] = {}
        """The provider's statistics as of a recent `match`, at most one second older than that."""
        self._told_at = float("-inf")

    def match(self, view: RequestView, exact: int) -> list[Candidate]:
        """The provider's candidates, not yet verified; none if it failed in any way.

        They are copies in plain integers, whatever objects the provider returned.
        """
        if self._clock() < self._resting_until:
            self.counts["resting"] += 1
            return []
        self.counts["asked"] += 1
        view = replace(view, tokens=read_only(view.tokens))
        found = _Proposals([], [], frozenset(), None)
        try:
            found = self._call(lambda: self._proposals(view, exact))
        except LateError:
            self._was_late()
            return []
        except Exception:
            self._fault("raised", "failed in match; the request goes on without its help")
        self._late_in_a_row, self._rest = 0, FIRST_REST
        self.zeroed_layers = found.zeroed_layers
        if found.stats is not None:
            self.told, self._told_at = found.stats, self._clock()
        self.counts["proposed"] += len(found.candidates) + len(found.invalid)
        for reason in found.invalid:
            self._fault("refused", f"proposed what is no candidate: {reason}")
        return found.candidates

    def nominate(self, view: RequestView) -> list[Candidate]:
        """As `match`, not counted, and only of a `bounded` provider: drafts must not wait."""
        if self._worker is not None:
            return []
        try:
            return self._call(lambda: self._proposals(view, 0)).candidates
        except Exception:
            self._fault("raised", "failed in match; drafts go on without its help")
            return []

    def count_not_cached(self, candidate: Candidate) -> None:
        """Count a candidate whose tokens are not cached where it says."""
        self._fault("refused", f"proposed what is not cached there: {candidate!r}")

    def on_published(self, run: PublishedRun) -> None:
        if self._rests_from_telling():
            self.counts["resting"] += 1
            return
        self._tell_evicted()
        self._tell(lambda: self._provider.on_published(run))

    def on_evicted(self, pages: IntArray) -> None:
        if self._rests_from_telling():
            self._evicted.append(pages.copy())
            if sum(map(len, self._evicted)) > self._donors.num_pages:
                self._evicted = [np.unique(np.concatenate(self._evicted))]
            return
        self._tell_evicted()
        self._tell(lambda: self._provider.on_evicted(pages))

    def clear(self) -> None:
        self._evicted.clear()
        self._tell(self._provider.clear)

    def settle(self, seconds: float) -> bool:
        """Wait for the provider's background work; False if it goes on."""
        try:
            return bool(contained(lambda: self._provider.settle(seconds)))
        except Exception:
            self._fault("raised", "failed in settle")
            return False

    def stats(self) -> dict[str, float]:
        """The guard's counts and the provider's own statistics."""
        own: dict[str, float] = {}
        self._tell(lambda: own.update(_figures(self._provider.stats())))
        return {**self.counts, **own}

    def _proposals(self, view: RequestView, exact: int) -> _Proposals:
        """Ask the provider. Runs on its thread: even reading its answer may raise or hang."""
        candidates: list[Candidate] = []
        invalid: list[str] = []
        for proposal in islice(self._provider.match(view, exact), MOST_CANDIDATES):
            try:
                candidates.append(_coerced(proposal))
            except Exception as error:
                invalid.append(f"{type(proposal).__name__}, {error}")
        zeroed: frozenset[int] = frozenset()
        if candidates:
            zeroed = frozenset(operator.index(layer) for layer in self._provider.zeroed_layers)
        stats = None
        if self._clock() - self._told_at >= _STATS_PERIOD:
            try:
                stats = _figures(self._provider.stats())
            except Exception:  # statistics are no reason to lose the candidates
                stats = None
        return _Proposals(candidates, invalid, zeroed, stats)

    def _call(self, call: Callable[[], _Result]) -> _Result:
        with self._donors.lent():
            if self._worker is None:
                return contained(call)
            return self._worker.run(call, self._budget)

    def _tell(self, call: Callable[[], None]) -> None:
        began = self._clock()
        try:
            self._call(call)
        except LateError:
            self._fault("late", "did not take in time what it was told; it missed some of it")
        except Exception:
            self._fault("raised", "failed when told what is cached")
        self._telling.spend(self._clock() - began)

    def _tell_evicted(self) -> None:
        """Tell the provider of pages that were evicted while it rested."""
        if self._evicted:
            pages = read_only(np.unique(np.concatenate(self._evicted)))
            self._evicted.clear()
            self._tell(lambda: self._provider.on_evicted(pages))

    def _rests_from_telling(self) -> bool:
        if self._worker is None or not self._telling.exhausted:
            return False
        if "slow" not in self._logged:
            self._logged.add("slow")
            what = "is slow to take what it is told; it is not told of every publication"
            _log.warning("fuzzy provider %s %s", self._name, what)
        return True

    def _was_late(self) -> None:
        self._fault("late", f"took more than the {1000 * self._budget:g} ms that it may take")
        self._late_in_a_row += 1
        if self._late_in_a_row >= LATE_IN_A_ROW:
            # Afterwards one late answer is enough for the next, longer rest.
            self._late_in_a_row = LATE_IN_A_ROW - 1
            self._resting_until = self._clock() + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)

    def _fault(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("fuzzy provider %s %s", self._name, what, exc_info=kind == "raised")


class _Allowance:
    """Seconds that may be spent: `burst` at once, TELLING_SHARE of all time in the long run."""

    def __init__(self, burst: float, clock: Callable[[], float]) -> None:
        self._burst = burst
        self._clock = clock
        self._left = burst
        self._at = clock()

    @property
    def exhausted(self) -> bool:
        self.spend(0.0)
        return self._left <= 0

    def spend(self, seconds: float) -> None:
        now = self._clock()
        self._left = min(self._burst, self._left + TELLING_SHARE * (now - self._at)) - seconds
        self._at = now


def _coerced(proposal: Any) -> Candidate:
    """A proposal as a Candidate of plain integers; raises what reading it raises, or ValueError."""
    tier = Tier(proposal.tier)
    start, length, page, donor_start, lead = (
        operator.index(getattr(proposal, name))
        for name in ("start", "length", "page", "donor_start", "lead")
    )
    if tier is Tier.MOVED:
        return Candidate(start, length, page, donor_start)
    if tier is Tier.EXACT:
        raise ValueError("a provider cannot propose exact reuse")
    similarity = float(proposal.similarity)
    if not -1.01 <= similarity <= 1.01:  # NaN compares false
        raise ValueError(f"its similarity is {similarity}, not between -1 and 1")
    tokens = _token_ids(proposal.donor_tokens, length)
    return Candidate(
        start, length, page, donor_start, tier, lead, min(similarity, 1.0), donor_tokens=tokens
    )


def _token_ids(values: Any, length: int) -> IntArray:
    """A copy of `values` as int32 (length); ValueError if they are something else."""
    given = np.asarray(values)
    if given.shape != (length,) or given.dtype.kind not in "iu":
        raise ValueError(f"its donor_tokens are not {length} integers")
    ids = given.astype(np.int32)
    if not np.array_equal(ids, given):
        raise ValueError("its donor_tokens do not fit into int32")
    return read_only(ids)


def _figures(stats: Mapping[Any, Any]) -> dict[str, float]:
    """A provider's statistics as finite floats; raises what reading them raises."""
    figures = {str(name): float(figure) for name, figure in stats.items()}
    return {name: figure for name, figure in figures.items() if math.isfinite(figure)}
