"""Limits on connections: how many there are, and how long the server waits for each client.

uvicorn's own limits cover only the time between two requests (`timeout_keep_alive`) and, in plain
text and for /health too, the number of requests (`limit_concurrency`). This module adds timeouts
for a request's head, for the rest of a body that was answered early and for a reader that stalls
(access.py has the body's), and a limit on connections that leaves room for /health.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import json
import logging
import resource
import sys
import termios
from dataclasses import replace
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from kvweave.config import ServerConfig
from kvweave.server.errors import error_body, error_response

log = logging.getLogger("kvweave.server")

PLACES = 64
"""Connections beyond the limit that stay open for a moment: for a refusal, or for /health."""
_OTHER_FILES = 256
"""Open files that are no connections: the model's, the log, events, pipes; with a reserve."""
_LEAST = 16
_BODY_SECONDS = 2.0
_BODY_BYTES = 2**20
"""How much of a refused request is read, so that its client gets to read the refusal."""
_LINGER_SECONDS = 5.0
"""For the rest of a body whose request is answered already. Closing at once would reset the
connection when more of it arrives, and the client could lose the answer."""


def with_files(config: ServerConfig) -> ServerConfig:
    """`config`, its `max_connections` lowered if this process may not open as many files.

    Raises the process's soft limit first, as far as needed and allowed.
    """
    wanted = config.max_connections + PLACES + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unbounded = resource.RLIM_INFINITY
    if soft == unbounded or soft >= wanted:
        return config
    allowed = wanted if hard == unbounded else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return config
    room = min(config.max_connections, max(_LEAST, allowed - PLACES - _OTHER_FILES))
    log.warning(
        "this process may open %d files (ulimit -n, LimitNOFILE), which is room for %d "
        "connections, not for --max-connections %d",
        allowed,
        room,
        config.max_connections,
    )
    return replace(config, max_connections=room)


class ConnectionLimiter:
    """Allows `most` connections. Up to PLACES more are answered 503, or get /health once.

    When a further one comes, the oldest of those is refused and closed: silent connections cannot
    keep a health check out. `server` is the application behind it.
    """

    def __init__(self, server: ASGIApp, most: int) -> None:
        self._server = server
        self._most = most
        self._excess: dict[Connection, None] = {}
        """Connections beyond `most`, in order of arrival."""

    def is_excess(self, connection: Connection, connected: int) -> bool:
        """Whether the new `connection` is beyond the limit; `connected` counts it."""
        if connected - len(self._excess) <= self._most:
            return False
        if len(self._excess) >= PLACES:
            oldest = next(iter(self._excess))
            self.forget(oldest)  # now: more may come before it is closed
            oldest.refuse(503, self._refusal)
        self._excess[connection] = None
        return True

    def forget(self, connection: Connection) -> None:
        """`connection` is closed; it need not have been beyond the limit."""
        self._excess.pop(connection, None)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application for connections beyond the limit."""
        if scope["path"] == "/health":
            await self._server(scope, receive, _closing(send))
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_read_out(receive), _BODY_SECONDS)
        refusal = error_response(self._refusal, status=503, headers={"Retry-After": "1"})
        await refusal(scope, receive, _closing(send))

    @property
    def _refusal(self) -> str:
        return (
            f"this server has {self._most} connections and takes no more (--max-connections): "
            "try again later"
        )


async def _read_out(receive: Receive) -> None:
    read, more = 0, True
    while more and read < _BODY_BYTES:
        message = await receive()
        read += len(message.get("body", b""))
        more = message.get("more_body", False)


def _closing(send: Send) -> Send:
    """`send`, for an answer after which the connection is closed."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await send(message)

    return closing


class Connection(H11Protocol):
    """One client's connection, with timeouts of `client_seconds` for reading and writing."""

    def __init__(
        self, *uvicorns: Any, limiter: ConnectionLimiter, client_seconds: float, **more: Any
    ) -> None:
        super().__init__(*uvicorns, **more)
        self._limiter = limiter
        self._client_seconds = client_seconds
        self._awaited: str | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Only the piece written last is buffered: an answer waits for its reader. With a mark of 0
        # pause_writing is called as soon as anything is left over.
        transport.set_write_buffer_limits(high=0)
        if self._limiter.is_excess(self, len(self.connections)):
            self.app = self._limiter.app
        self._set_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves the timer if the client reset
        self._limiter.forget(self)
        for timer in (self._read_timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def handle_events(self) -> None:
        super().handle_events()
        self._set_read_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_read_timer()

    def _set_read_timer(self) -> None:
        """Start a timer when another part of a request is awaited; single bytes do not reset it."""
        awaited = self._awaited_part()
        if awaited == self._awaited:
            return
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._awaited, self._read_timer = awaited, None
        if awaited is not None:
            seconds = _LINGER_SECONDS if awaited == "body" else self._client_seconds
            self._read_timer = self.loop.call_later(seconds, self._on_read_timeout)

    def _awaited_part(self) -> str | None:
        """What the client has still to send: "head", "body" (of an answered request), or None."""
        if self.transport.is_closing():
            return None
        if self.conn.their_state is h11.IDLE:
            # Between two requests uvicorn's own timer runs until the first byte comes.
            return "head" if self.timeout_keep_alive_task is None else None
        answered = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)
        return "body" if answered and self.conn.their_state is h11.SEND_BODY else None

    def _on_read_timeout(self) -> None:
        if self._awaited == "head" and self.conn.trailing_data[0]:
            self.refuse(408, f"no whole request came within {self._client_seconds:g} seconds")
        else:
            # Close silently: without a pending request, an error body could be read as the next
            # response.
            self.transport.close()

    def pause_writing(self) -> None:
        """Called by the transport when the client does not take all that was written."""
        super().pause_writing()
        self._set_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _set_write_timer(self) -> None:
        left = _unacknowledged(self.transport)
        self._write_timer = self.loop.call_later(self._client_seconds, self._on_write_timeout, left)

    def _on_write_timeout(self, before: int) -> None:
        if _unacknowledged(self.transport) < before:
            self._set_write_timer()
            return
        log.info("a client took nothing of its answer for %g seconds", self._client_seconds)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse input that is not HTTP; uvicorn calls this while handling h11's error."""
        reason = sys.exc_info()[1]
        status = reason.error_status_hint if isinstance(reason, h11.RemoteProtocolError) else 400
        self.refuse(status, f"this is no valid HTTP request: {reason or msg}")

    def refuse(self, status: int, message: str) -> None:
        """Close, after an error in the usual shape unless part of an answer was sent."""
        if self.cycle is not None:  # the task that answers must not write any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = json.dumps(error_body(message, status=status)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        phrase = STATUS_PHRASES[status]
        head = h11.Response(status_code=status, headers=headers, reason=phrase)
        parts = [self.conn.send(event) for event in (head, h11.Data(data=body), h11.EndOfMessage())]
        self.transport.write(b"".join(part or b"" for part in parts))
        self.transport.close()


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes that the client has not acknowledged, here and in the kernel.

    The kernel's count too: it asks for more only when its buffer is nearly empty.
    """
    kernels = array.array("i", [0])
    with contextlib.suppress(OSError):  # not every system counts them for a socket
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kernels)
    return transport.get_write_buffer_size() + kernels[0]
