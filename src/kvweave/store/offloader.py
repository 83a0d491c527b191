"""Writes the KV of finished requests to the store, and reads it back for requests that wait.

Threads of the offloader's own look up, read and write; the engine never waits for the disk, and a
request waits for no longer than computing would take.

    request arrives   expect    a thread looks its prefix and its moved text up in the catalogue
    while it waits    pump      the engine leases pages for a path; threads read it to buffers and
                                copy these to the pages; the engine publishes piece after piece,
                                as if it had just computed them
    request has ended offer     a thread looks up what is new; the engine copies it to buffers; a
                                thread writes these
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvweave.prefix.contract import PrefixCache
from kvweave.prefix.lease import Lease
from kvweave.store.access import Offloading, PageContent, StoreAccess
from kvweave.store.figures import Speeds, mean
from kvweave.store.loads import Loads
from kvweave.store.pages import PageFormat, PageStore
from kvweave.store.saves import Saves

LEAST_TOKENS = 64
"""Fewer tokens are neither stored nor read: finding them costs about what computing them does."""

_SHARE = 0.05
"""Of a step's time that may go to copies between it and the next one."""


class Offloader:
    """The engine's side of a store. Belongs to the engine's thread."""

    def __init__(
        self,
        cache: PrefixCache,
        content: PageContent,
        store: PageStore,
        *,
        stride: int,
        shortest_span: int | None,
        least_tokens: int = LEAST_TOKENS,
        patience: float | None = None,
    ) -> None:
        """`shortest_span`: least tokens of moved text that the cache can use; None: it moves none.
        `patience`: seconds that a request waits for what is stored; None: as long as it would take
        to compute that, as far as is known.

        sqlite3.Error if the catalogue can be neither read nor made anew.
        """
        access = StoreAccess(store, stride)
        speeds = Speeds.from_json(access.catalog().meta("speeds") or b"")
        self._of = Offloading(access, cache, content, speeds, least_tokens, cache.release)
        self._access, self.counters = access, self._of.counters
        self._saves = Saves(self._of)
        self._loads = Loads(self._of, shortest_span, patience)
        self._step_seconds = 0.0
        """Of the last step."""
        self.expect, self.awaited = self._loads.expect, self._loads.awaited
        self.forget, self.offer = self._loads.forget, self._saves.offer
        self.give_way, self.readers_at_work = self._loads.give_way, self._loads.readers_at_work

    def release_by(self, give_back: Callable[[Lease], None]) -> None:
        """Have leases released by `give_back`."""
        self._of.give_back = give_back

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, on other threads, when there is something to `pump`."""
        self._access.wake = wake

    @property
    def leases(self) -> list[Lease]:
        """What is being read holds these."""
        return self._loads.leases

    @property
    def page_format(self) -> PageFormat:
        """Of the pages that are kept."""
        return self._access.store.format

    def figures(self) -> dict[str, float]:
        """Gauges and counters by name."""
        counters = self.counters
        return {
            "stored_pages": self._access.store.count,
            "stored_bytes": self._access.store.count * self._of.content.page_bytes,
            "waiting_saves": len(self._saves),
            "waiting_loads": len(self._loads),
            "loaded_tokens": counters.loaded,
            "saved_tokens": counters.saved,
            "loads": counters.loads,
            "late_loads": counters.late_loads,
            "declined_loads": counters.declined_loads,
            "dropped_saves": counters.dropped_saves,
            "damaged_pages": counters.damaged_pages,
            "faults": self._access.faults,
        }

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` tokens of prompts in this time."""
        self._step_seconds = seconds
        if tokens >= self._of.least and seconds > 0:
            self._of.speeds.compute = mean(self._of.speeds.compute, tokens / seconds)

    def pump(self, seconds: float) -> bool:
        """Go on with loads and saves for about this long; False if there was nothing to do.

        After a long step, as prompts make them, it may take longer: a share of that step's time.
        """
        end, worked = time.monotonic() + max(seconds, _SHARE * self._step_seconds), False
        self._step_seconds = 0.0
        while self._access.done:
            self._access.done.popleft()()
            worked = True
            if time.monotonic() >= end:
                return True
        self._loads.go_on()
        while time.monotonic() < end and self._saves.go_on():
            worked = True
        return worked

    def wait(self, seconds: float) -> None:
        """Wait for something to `pump`: for an engine that has nothing else to do."""
        if not self._access.done:
            self._access.news.wait(seconds)
        self._access.news.clear()

    def close(self, seconds: float = 10.0) -> None:
        """Write what waits to be written, for up to this long, and let go of the folder."""
        self._loads.close()
        self._saves.newest_first()
        end = time.monotonic() + seconds
        while self.saving and not self._access.resting and time.monotonic() < end:
            if not self.pump(1.0):
                self.wait(0.05)
        self._access.writer.put(partial(self._access.guarded, self._write_speeds))
        self._access.close()

    @property
    def saving(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._saves.busy or self._access.done)

    def _write_speeds(self) -> None:
        catalog = self._access.catalog()
        with catalog.changing():
            catalog.set_meta("speeds", self._of.speeds.to_json())
