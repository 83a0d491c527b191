"""What a connection may cost: how many there are, how long each may be silent, how slowly it reads.

uvicorn bounds only the time between two requests. Here every other wait for a client has a clock as
well, all but the body's (limits.py): for the head of a request, for the rest of a body that nobody
wants any more, for a piece of an answer to be taken.
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
from typing import Any, Protocol

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from kvweave.config import ServerConfig
from kvweave.errors import ConfigError
from kvweave.server.errors import error_body, error_response

log = logging.getLogger("kvweave.server")

_OTHERS = 256
"""Files that are no connections: the model's, the log, events, pipes; with some to spare."""
_LEAST = 16


def with_files(config: ServerConfig) -> ServerConfig:
    """`config`, with no more connections than this process may open files.

    Raises its soft limit as far as needed and allowed. ConfigError if hardly any are left.
    """
    wanted = config.max_connections + PLACES + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unbounded = resource.RLIM_INFINITY
    if soft == unbounded or soft >= wanted:
        return config
    allowed = wanted if hard == unbounded else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return config
    room = allowed - PLACES - _OTHERS
    if room < min(_LEAST, config.max_connections):
        raise ConfigError(
            [
                f"this process may open {allowed} files, but {_LEAST + PLACES + _OTHERS} are the "
                "least that a server needs: raise the limit (ulimit -n, LimitNOFILE)"
            ]
        )
    log.warning(
        "this process may open %d files (ulimit -n, LimitNOFILE), which is room for %d "
        "connections, not for --max-connections %d",
        allowed,
        room,
        config.max_connections,
    )
    return replace(config, max_connections=room)


PLACES = 64
_BODY_SECONDS = 2.0
_BODY_BYTES = 2**20
"""Of a refused request, read so that the client is not cut off before it reads the refusal."""


class Guest(Protocol):
    def refuse(self, status: int, message: str) -> None:
        """Say this and close."""
        ...


class ConnectionLimiter:
    """Keeps at most PLACES connections above `most`. `server` is the application behind it."""

    def __init__(self, server: ASGIApp, most: int) -> None:
        self._server = server
        self._most = most
        self._guests: dict[Guest, None] = {}
        """In order of arrival."""

    def admit(self, guest: Guest, connected: int) -> bool:
        """Whether `guest`, one of so many connections, is beyond the limit; then it has a place."""
        if connected - len(self._guests) <= self._most:
            return False
        if len(self._guests) >= PLACES:
            first = next(iter(self._guests))
            self.leave(first)  # at once: others may come before it is gone
            first.refuse(503, self._refusal)
        self._guests[guest] = None
        return True

    def leave(self, guest: Guest) -> None:
        """It is gone; others may be, too."""
        self._guests.pop(guest, None)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers for the server: only /health, and once."""
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
    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await send(message)

    return closing


_LINGER_SECONDS = 5.0
"""For a client that was answered before it had sent its body: closing at once could cost it the
answer, since what arrives for a closed connection resets it."""


class Connection(H11Protocol):
    """One client's connection. Those beyond the most that are wanted sit in the `lobby`."""

    def __init__(
        self, *uvicorns: Any, lobby: ConnectionLimiter, client_seconds: float, **more: Any
    ) -> None:
        super().__init__(*uvicorns, **more)
        self._lobby = lobby
        self._client_seconds = client_seconds
        self._owed_by: asyncio.TimerHandle | None = None
        self._owed: str | None = None
        self._taken_by: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Nothing is buffered here but what was written last: the answer waits for its reader, who
        # is noticed when there is a rest, and not when there is a lot.
        transport.set_write_buffer_limits(high=0)
        if self._lobby.admit(self, len(self.connections)):
            self.app = self._lobby.app
        self._set_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn forgets it where the client reset
        self._lobby.leave(self)
        for clock in (self._owed_by, self._taken_by):
            if clock is not None:
                clock.cancel()

    def handle_events(self) -> None:
        super().handle_events()
        self._set_clock()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_clock()

    def _set_clock(self) -> None:
        """Start a clock for what the client owes, unless it runs already: bytes do not wind it."""
        owed = self._owes()
        if owed == self._owed:
            return
        if self._owed_by is not None:
            self._owed_by.cancel()
        self._owed, self._owed_by = owed, None
        if owed is not None:
            seconds = _LINGER_SECONDS if owed == "body" else self._client_seconds
            self._owed_by = self.loop.call_later(seconds, self._on_read_timeout)

    def _owes(self) -> str | None:
        if self.transport.is_closing():
            return None
        if self.conn.their_state is h11.IDLE:
            # Between two requests uvicorn's own clock runs, until the first byte comes.
            return "head" if self.timeout_keep_alive_task is None else None
        answered = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)
        return "body" if answered and self.conn.their_state is h11.SEND_BODY else None

    def _on_read_timeout(self) -> None:
        if self._owed == "head" and self.conn.trailing_data[0]:
            self.refuse(408, f"no whole request came within {self._client_seconds:g} seconds")
        else:  # to who asked for nothing nothing is said: it could pass for the next answer
            self.transport.close()

    def pause_writing(self) -> None:
        """There is a rest that the client's side does not take."""
        super().pause_writing()
        self._await_taking()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._taken_by is not None:
            self._taken_by.cancel()

    def _await_taking(self) -> None:
        left = _not_taken(self.transport)
        self._taken_by = self.loop.call_later(self._client_seconds, self._has_it_taken, left)

    def _has_it_taken(self, before: int) -> None:
        if _not_taken(self.transport) < before:
            self._await_taking()
            return
        log.info("a client took nothing of its answer for %g seconds", self._client_seconds)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Said of what is no HTTP; uvicorn calls it while handling h11's reason."""
        reason = sys.exc_info()[1]
        status = reason.error_status_hint if isinstance(reason, h11.RemoteProtocolError) else 400
        self.refuse(status, f"this is no valid HTTP request: {reason or msg}")

    def refuse(self, status: int, message: str) -> None:
        """Last words: an error in the shape of all others, unless an answer is half out."""
        if self.cycle is not None:  # its task must not speak any more
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
        said = [self.conn.send(event) for event in (head, h11.Data(data=body), h11.EndOfMessage())]
        self.transport.write(b"".join(part or b"" for part in said))
        self.transport.close()


def _not_taken(transport: asyncio.Transport) -> int:
    """Bytes that the other side has not acknowledged, those in the kernel's hands included: it asks
    for more only when much of what it has is gone."""
    kernels = array.array("i", [0])
    with contextlib.suppress(OSError):  # not every system counts them for a socket
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kernels)
    return transport.get_write_buffer_size() + kernels[0]
