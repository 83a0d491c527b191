"""Encodes event batches and publishes them over ZeroMQ: PUB for live ones, ROUTER for replays.

A message is `topic, sequence number (8 bytes, big-endian), payload`. A request to the ROUTER is a
sequence number; the answer is every kept batch from there on, then a message with number -1. A
dropped batch uses its number, so subscribers see a loss as a gap in the numbers.

The payload is msgpack: `[time, [events], rank]`. Today's vLLM and SGLang write an event as a map
with its `type`; until 2026 they wrote an array, `type` first, then the fields in the order below.
Readers skip unknown keys, so one map serves both. Hashes are unsigned 64-bit integers, as in vLLM.
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

import msgpack
import zmq

from kvweave.config.cache import FLAG, EventsConfig
from kvweave.errors import ConfigError
from kvweave.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

_ORDER = ("block_hashes", "parent_block_hash", "token_ids", "block_size")
"""Order of the fields that readers use."""


class Batch(NamedTuple):
    """Changes of one engine step, and their time in seconds since 1970."""

    time: float
    events: list[KVEvent]


def encode_batch(events: Sequence[KVEvent], time: float, form: str = "map") -> bytes:
    """One message's payload; `form` is EventsConfig's `format`.

    A salt may contain half a surrogate pair, which UTF-8 cannot encode; its escape is written.
    """
    write = _as_map if form == "map" else _as_array
    content = [time, [write(event) for event in events], 0]
    data: bytes = msgpack.packb(content, unicode_errors="backslashreplace")
    return data


def decode_batch(payload: bytes) -> Batch:
    """A payload in either form, kvweave's or another engine's; ValueError if it is broken.

    Events of other types are skipped.
    """
    try:
        time, events, *_ = msgpack.unpackb(payload)
        return Batch(time, [event for event in map(_read, events) if event is not None])
    except (TypeError, KeyError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"this is no batch of KV events: {error!r}") from None


def _fields(event: KVEvent) -> dict[str, Any]:
    """Name and value in vLLM's order. An absent adapter is null: vLLM requires the keys."""
    if isinstance(event, BlockStored):
        return {
            "block_hashes": event.block_hashes,
            "parent_block_hash": event.parent_block_hash,
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": None,
            "medium": None,
            "lora_name": None,
        }
    if isinstance(event, BlockRemoved):
        return {"block_hashes": event.block_hashes, "medium": None}
    return {}


def _as_map(event: KVEvent) -> dict[str, Any]:
    content = {"type": type(event).__name__, **_fields(event)}
    if isinstance(event, BlockStored) and event.salt is not None:
        content["cache_salt"] = event.salt  # SGLang's key; vLLM's, for first blocks, follows
        if event.parent_block_hash is None:
            content["extra_keys"] = [[event.salt], *[None] * (len(event.block_hashes) - 1)]
    return content


def _as_array(event: KVEvent) -> list[Any]:
    return [type(event).__name__, *_fields(event).values()]


def _read(content: Any) -> KVEvent | None:
    if isinstance(content, dict):
        kind = content["type"]
    else:
        kind, *values = content
        content = dict(zip(_ORDER, values, strict=False))
    if kind == "BlockStored":
        return BlockStored(
            tuple(content["block_hashes"]),
            content["parent_block_hash"],
            tuple(content["token_ids"]),
            content["block_size"],
            content.get("cache_salt"),
        )
    if kind == "BlockRemoved":
        return BlockRemoved(tuple(content["block_hashes"]))
    return AllBlocksCleared() if kind == "AllBlocksCleared" else None


logger = logging.getLogger("kvweave.events")

LAST = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""
_CLOSE_SECONDS = 2.0
_LOOPBACK = ("tcp://127.", "tcp://[::1]")


class _Batch(NamedTuple):
    number: int
    time: float
    events: Sequence[KVEvent]


class ZmqPublisher:
    """An EventSink. Only its own thread uses the sockets."""

    def __init__(self, config: EventsConfig) -> None:
        """Binds or connects at once; ConfigError gives the reason if an address cannot be used."""
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
        self._waker, self._wakeup = socket.socketpair()
        self._waker.setblocking(False)
        self._wakeup.setblocking(False)
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
        """Hand a batch to the thread, or drop it if the queue is full. For one caller at a time."""
        number, self._next = self._next, self._next + 1
        if not self._thread.is_alive():  # its end was logged
            self.dropped += 1
            return
        if len(self._waiting) >= self.config.max_queue_size:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("KV events come faster than they are sent: batches are dropped")
            return
        self._waiting.append(_Batch(number, time.time(), events))
        self._wake()

    def close(self) -> None:
        """Send waiting batches, then stop."""
        atexit.unregister(self.close)
        self._closing = True
        self._wake()
        self._thread.join(_CLOSE_SECONDS)

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # full: it wakes up anyway; closed: it has ended
            self._waker.send(b"!")

    # The methods below run on the thread.

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            while not self._closing or self._waiting:
                ready = dict(poller.poll())
                if self._wakeup.fileno() in ready:
                    self._wakeup.recv(4096)
                self._send_waiting()
                if self._router is not None and self._router in ready:
                    self._replay(self._router)
        except Exception:
            logger.critical("KV events are not published any more", exc_info=True)
            self._waiting.clear()
        finally:
            self._close_sockets()
            self._waker.close()
            self._wakeup.close()

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
            logger.warning("a replay request is not 8 bytes long and is ignored")
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
    """True if other machines reach it."""
    return endpoint.startswith("tcp://") and not endpoint.startswith(_LOOPBACK)


def _attach(taken: zmq.Socket[bytes], endpoint: Any, bind: bool = True) -> str:
    """Bind or connect; returns the final address (the system chooses port 0)."""
    try:
        if bind:
            taken.bind(endpoint)
        else:
            taken.connect(endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if bind else "connect to"
        raise ConfigError([f"{FLAG}: cannot {verb} {endpoint}: {error.strerror}"]) from None
    return taken.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
