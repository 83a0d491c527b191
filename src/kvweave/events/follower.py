"""Follows a publisher from another process, kvweave's or any that speaks as vLLM and SGLang do.

Whoever applies the events in order knows which blocks the publisher's cache holds, or fewer: where
batches are lost for good, or cannot be read, an AllBlocksCleared stands in their place.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator

import zmq

from kvweave.events.wire import Batch, decode_batch
from kvweave.prefix.events import AllBlocksCleared, KVEvent

logger = logging.getLogger("kvweave.events")

_LAST = 2**64 - 1
"""The number -1, read without its sign."""
_MOST_MESSAGES = 10_000
"""Taken in one call, so that it ends however fast events come; and kept for one that is late."""


class EventFollower:
    """Never waits and needs no thread: `drain` takes what has arrived. For one thread at a time."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        patience: float = 1.0,
    ) -> None:
        """Begins with what the publisher still keeps for replay, if it has an address for that.

        `patience`: seconds without an answer after which what was asked for counts as lost.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._live = context.socket(zmq.SUB)
        self._live.set_hwm(_MOST_MESSAGES)  # what is beyond leaves a gap, and is asked for again
        self._live.subscribe(topic)
        self._live.connect(endpoint)
        self._replay = context.socket(zmq.DEALER) if replay_endpoint else None
        if self._replay is not None:
            self._replay.set_hwm(0)
            self._replay.connect(replay_endpoint or "")
        self._patience = patience
        self._next = 0
        """Number of the batch that follows the last one applied."""
        self._time = 0.0
        """When that one was made."""
        self._asked: int | None = None
        """The number from which on batches were last asked for again."""
        self._deadline: float | None = None
        """Of the answer to that, while it is awaited."""
        self._held: deque[tuple[int, Batch]] = deque()
        """Live batches that wait for it."""
        self._ask()

    def wait(self, seconds: float) -> bool:
        """Whether there was something to drain, at the latest after `seconds`."""
        poller = zmq.Poller()
        for taken in filter(None, (self._live, self._replay)):
            poller.register(taken, zmq.POLLIN)
        return bool(poller.poll(round(seconds * 1000)))

    def drain(self) -> list[KVEvent]:
        """What became known since the last call, in order."""
        events: list[KVEvent] = []
        if self._replay is not None:
            for number, payload in _arrived(self._replay):
                if number == _LAST:
                    self._deadline = None
                    if not self._held:  # what is lost from now on has not been asked for
                        self._asked = None
                elif number >= self._next:
                    self._apply(number, self._read(payload), events)
        for number, payload in _arrived(self._live):
            self._held.append((number, self._read(payload)))
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline = None
        while self._held and self._deadline is None:
            self._go_on(events)
        return events

    def close(self) -> None:
        self._live.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)

    def _read(self, payload: bytes) -> Batch:
        """The batch; one that nobody can read may have removed anything."""
        try:
            return decode_batch(payload)
        except ValueError as error:
            logger.warning("%s; what this cache holds is learnt anew", error)
            return Batch(self._time, [AllBlocksCleared()])

    def _go_on(self, events: list[KVEvent]) -> None:
        """Apply the oldest batch held, or ask for those before it."""
        number, batch = self._held[0]
        if number < self._next:
            if batch.time <= self._time:  # the replay had it already
                self._held.popleft()
                return
            events.append(AllBlocksCleared())  # the publisher began anew
            self._next, self._asked = 0, None
        if number > self._next and self._asked != self._next and self._ask():
            return
        self._held.popleft()
        self._apply(number, batch, events)

    def _apply(self, number: int, batch: Batch, events: list[KVEvent]) -> None:
        if number > self._next:
            events.append(AllBlocksCleared())  # what was lost may have removed anything
        self._next, self._time = number + 1, batch.time
        events += batch.events

    def _ask(self) -> bool:
        """Ask for batches from the next on again, if there is anybody to ask."""
        if self._replay is None:
            return False
        self._replay.send_multipart((b"", self._next.to_bytes(8, "big")))
        self._asked = self._next
        self._deadline = time.monotonic() + self._patience
        return True


def _arrived(taken: zmq.Socket[bytes]) -> Iterator[tuple[int, bytes]]:
    """Number and payload of the messages that are here; replays have an empty frame before."""
    for _ in range(_MOST_MESSAGES):
        try:
            *_, number, payload = taken.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield int.from_bytes(number, "big"), payload
