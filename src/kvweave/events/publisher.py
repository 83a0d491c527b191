"""Sends event batches over ZeroMQ: a PUB socket says what happens, a ROUTER what happened.

A message is `topic, sequence number (8 bytes, big-endian), payload`. Whoever asks the ROUTER for a
sequence number gets every batch that is still kept from there on, then one with number -1. A batch
that is dropped uses up its number, so a gap in the numbers is what tells a subscriber of a loss.
"""

from __future__ import annotations

import atexit
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import zmq

from kvweave.config.events import FLAG, EventsConfig
from kvweave.errors import ConfigError
from kvweave.events.wire import encode_batch
from kvweave.prefix.events import KVEvent

logger = logging.getLogger("kvweave.events")

LAST = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""
_FAREWELL_SECONDS = 2.0
_LOOPBACK = ("tcp://127.", "tcp://[::1]")


class _Batch(NamedTuple):
    number: int
    time: float
    events: Sequence[KVEvent]


class ZmqPublisher:
    """An EventSink with a thread of its own, which alone touches the sockets."""

    def __init__(self, config: EventsConfig) -> None:
        """Takes the addresses at once; ConfigError says why one cannot be had."""
        self.config = config
        self.dropped = 0
        self._next = 0
        self._waiting: deque[_Batch] = deque()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._topic = config.topic.encode()
        self._closing = False
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._router = context.socket(zmq.ROUTER) if config.replay_endpoint else None
        if self._router is not None:
            self._router.set_hwm(config.buffer_steps + 1)  # one whole replay per client
        try:
            self.endpoint = _attach(self._pub, config.endpoint, config.binds)
            self.replay_endpoint = (
                None if self._router is None else _attach(self._router, config.replay_endpoint)
            )
        except ConfigError:
            self._close_sockets()
            raise
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._thread = threading.Thread(target=self._work, name="kvweave-events", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        bound = (self.endpoint if config.binds else "", self.replay_endpoint or "")
        for open_to_all in filter(_is_open, bound):
            logger.warning("anyone who reaches %s may read the tokens of prompts", open_to_all)

    @property
    def published(self) -> int:
        """Batches taken since start, dropped ones included."""
        return self._next

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Hand a batch to the thread, or drop it if too many wait. One thread at a time."""
        number, self._next = self._next, self._next + 1
        if not self._thread.is_alive():  # why was said when it ended
            self.dropped += 1
            return
        if len(self._waiting) >= self.config.max_queue_size:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("KV events come faster than they are sent: batches are dropped")
            return
        self._waiting.append(_Batch(number, time.time(), events))
        self._ring()

    def close(self) -> None:
        """Send what waits, then stop."""
        atexit.unregister(self.close)
        self._closing = True
        self._ring()
        self._thread.join(_FAREWELL_SECONDS)

    def _ring(self) -> None:
        with suppress(BlockingIOError, OSError):  # full: it rings already; closed: nobody listens
            self._bell.send(b"!")

    # On the thread.

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._ear, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            while not self._closing or self._waiting:
                ready = dict(poller.poll())
                if self._ear.fileno() in ready:
                    self._ear.recv(4096)
                self._send_waiting()
                if self._router is not None and self._router in ready:
                    self._replay(self._router)
        except Exception:
            logger.critical("KV events are not published any more", exc_info=True)
            self._waiting.clear()
        finally:
            self._close_sockets()
            self._bell.close()
            self._ear.close()

    def _send_waiting(self) -> None:
        while self._waiting:
            batch = self._waiting.popleft()
            payload = encode_batch(batch.events, batch.time, self.config.format)
            number = batch.number.to_bytes(8, "big")
            self._pub.send_multipart((self._topic, number, payload))  # a PUB socket never waits
            self._sent.append((batch.number, payload))

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        client, *delimiter, first = router.recv_multipart()
        if delimiter != [b""] or len(first) != 8:
            logger.warning("a replay was asked for with something else than 8 bytes")
            return
        start = int.from_bytes(first, "big")
        for number, payload in self._sent:
            if number >= start:
                router.send_multipart(
                    (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                )
        router.send_multipart((client, b"", b"", LAST, b""))

    def _close_sockets(self) -> None:
        self._pub.close(linger=1000)
        if self._router is not None:
            self._router.close(linger=0)


def _is_open(endpoint: str) -> bool:
    """Whether others than this machine's users reach it."""
    return endpoint.startswith("tcp://") and not endpoint.startswith(_LOOPBACK)


def _attach(taken: zmq.Socket[bytes], endpoint: Any, bind: bool = True) -> str:
    """Bind or connect; returns the address as it became (a port 0 is chosen by the system)."""
    try:
        if bind:
            taken.bind(endpoint)
        else:
            taken.connect(endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if bind else "connect to"
        raise ConfigError([f"{FLAG}: cannot {verb} {endpoint}: {error.strerror}"]) from None
    return taken.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
