"""Where connections beyond the limit wait to be told so: few, not long, and /health is answered.

Whoever speaks at once is answered in words. Who does not makes room for who comes next, so that a
flood of silent connections hides neither the refusal nor /health.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.server.errors import error_response

PLACES = 64
_BODY_SECONDS = 2.0
_BODY_BYTES = 2**20
"""Of a refused request, read so that the client is not cut off before it reads the refusal."""


class Guest(Protocol):
    def refuse(self, status: int, message: str) -> None:
        """Say this and close."""
        ...


class Lobby:
    """Keeps at most PLACES connections above `most`. `server` is the application behind it."""

    def __init__(self, server: ASGIApp, most: int) -> None:
        self._server = server
        self._most = most
        self._guests: dict[Guest, None] = {}
        """In order of arrival."""

    def has_to_take(self, guest: Guest, connected: int) -> bool:
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
