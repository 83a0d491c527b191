"""An HTTP client of one connection per request, which can be cut at any moment."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

SECONDS = 600.0
"""For an answer; who takes longer has hung. Low priorities wait as long as higher ones come."""


class LeftError(Exception):
    """The client itself has gone, as it had planned."""


@dataclass(slots=True)
class Reply:
    """What came back. `events` are those of a stream; `body` is what else was said."""

    status: int
    headers: dict[str, str]
    body: Any = None
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    """A stream's end was announced."""
    seconds: float = 0.0

    @property
    def error(self) -> dict[str, Any] | None:
        """The error that came instead of an answer, or ended its stream."""
        if isinstance(self.body, dict) and "error" in self.body:
            return dict(self.body["error"])
        return next((dict(each["error"]) for each in self.events if "error" in each), None)


@dataclass(frozen=True, slots=True)
class Departure:
    """When to cut the connection: after so many seconds, or once so many events have come."""

    seconds: float | None = None
    events: int | None = None


class Client:
    """Asks one server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80

    async def get(self, path: str) -> Reply:
        return await self.ask("GET", path)

    async def post(self, path: str, body: Any, leave: Departure | None = None) -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask("POST", path, raw, leave)

    async def ask(
        self, method: str, path: str, body: bytes = b"", leave: Departure | None = None
    ) -> Reply:
        """LeftError if the connection was cut by plan; OSError, EOFError if the server did it."""
        leave = leave or Departure()
        began = time.monotonic()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(head.encode() + body)
            limit = SECONDS if leave.seconds is None else leave.seconds
            reply = await asyncio.wait_for(_read(reader, leave.events), limit)
        except TimeoutError:
            if leave.seconds is None:
                raise EOFError(f"no answer within {SECONDS:g} seconds") from None
            raise LeftError from None
        finally:
            writer.close()
        reply.seconds = time.monotonic() - began
        return reply


async def _read(reader: asyncio.StreamReader, most: int | None) -> Reply:
    status = int((await reader.readline()).split()[1])
    headers: dict[str, str] = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    reply = Reply(status, headers)
    if headers.get("content-type", "").startswith("text/event-stream"):
        await _events(reader, reply, most)
        return reply
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    is_json = headers.get("content-type", "").startswith("application/json")
    reply.body = json.loads(raw) if is_json else raw
    return reply


async def _events(reader: asyncio.StreamReader, reply: Reply, most: int | None) -> None:
    """Lines of a chunked stream: what is no event is the length of a chunk, or empty."""
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            reply.done = True
        elif line.startswith(b"data: "):
            reply.events.append(json.loads(line[6:]))
            if most is not None and len(reply.events) >= most:
                raise LeftError
