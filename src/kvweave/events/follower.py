"""Follows the cache events of another process: kvweave, vLLM or SGLang.

Applied in order, the events give the blocks in the publisher's cache, or a subset: an
AllBlocksCleared replaces batches that are lost or unreadable.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator

import zmq

from kvweave.events.publisher import Batch, decode_batch
from kvweave.prefix.events import AllBlocksCleared, KVEvent

logger = logging.getLogger("kvweave.events")

_LAST = 2**64 - 1
"""The number -1, read without its sign."""
_MOST_MESSAGES = 10_000
"""Limit of one call, which ends it at any rate of events, and of the receive queue."""


class EventFollower:
    """`drain` takes the messages that have arrived and never waits. For one thread at a time."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        patience: float = 1.0,
    ) -> None:
        """Begin with the batches that the publisher keeps for replay, if it has a replay address.

        `patience`: seconds without an answer after which requested batches count as lost.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._live = context.socket(zmq.SUB)
        self._live.set_hwm(_MOST_MESSAGES)  # more leave a gap and are requested again
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
        """Time of that batch."""
        self._asked: int | None = None
        """First number of the last replay request."""
        self._deadline: float | None = None
        """Deadline of its answer; None if no answer is due."""
        self._held: deque[tuple[int, Batch]] = deque()
        """Live batches that wait for the replay."""
        self._ask()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; True if there are messages to drain."""
        poller = zmq.Poller()
        for taken in filter(None, (self._live, self._replay)):
            poller.register(taken, zmq.POLLIN)
        return bool(poller.poll(round(seconds * 1000)))

    def drain(self) -> list[KVEvent]:
        """Events since the last call, in order."""
        events: list[KVEvent] = []
        if self._replay is not None:
            for number, payload in _arrived(self._replay):
                if number == _LAST:
                    self._deadline = None
                    if not self._held:  # later losses need a new request
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
        """Decode a batch; an unreadable one may have removed any block, so it clears all."""
        try:
            return decode_batch(payload)
        except ValueError as error:
            logger.warning("%s; the state of this cache is rebuilt from new events", error)
            return Batch(self._time, [AllBlocksCleared()])

    def _go_on(self, events: list[KVEvent]) -> None:
        """Apply the oldest held batch, or request those before it."""
        number, batch = self._held[0]
        if number < self._next:
            if batch.time <= self._time:  # the replay contained it
                self._held.popleft()
                return
            events.append(AllBlocksCleared())  # the publisher restarted
            self._next, self._asked = 0, None
        if number > self._next and self._asked != self._next and self._ask():
            return
        self._held.popleft()
        self._apply(number, batch, events)

    def _apply(self, number: int, batch: Batch, events: list[KVEvent]) -> None:
        if number > self._next:
            events.append(AllBlocksCleared())  # lost batches may have removed any block
        self._next, self._time = number + 1, batch.time
        events += batch.events

    def _ask(self) -> bool:
        """Request a replay from the next batch on; False without a replay address."""
        if self._replay is None:
            return False
        self._replay.send_multipart((b"", self._next.to_bytes(8, "big")))
        self._asked = self._next
        self._deadline = time.monotonic() + self._patience
        return True


def _arrived(taken: zmq.Socket[bytes]) -> Iterator[tuple[int, bytes]]:
    """Number and payload of each waiting message; replays have an empty frame before."""
    for _ in range(_MOST_MESSAGES):
        try:
            *_, number, payload = taken.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield int.from_bytes(number, "big"), payload
