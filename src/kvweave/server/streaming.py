"""Responses that live as long as their client: plain answers and server-sent events.

Both watch the connection. When the client goes away, in the queue, in prefill or between two
tokens, the generation is closed at once, which aborts it in the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Iterable
from typing import Any, Protocol, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvweave.errors import KvweaveError
from kvweave.server.errors import body_of
from kvweave.server.generation import Batch, Generation

log = logging.getLogger("kvweave.server")
T = TypeVar("T")


class Writer(Protocol):
    """An endpoint's way to write a generation: as one object, or as a series of events."""

    def add(self, batch: Batch) -> Iterable[dict[str, Any]]:
        """The events that a batch makes (none, while a plain answer is collected)."""
        ...

    def end(self) -> dict[str, Any] | None:
        """What comes when all answers are complete: the plain answer, a stream's last event."""
        ...


class ClientGoneError(Exception):
    """Nobody is there to read the answer."""


class GenerationResponse(Response):
    """Runs a generation while the client is there, and sends what `writer` makes of it.

    Nothing is sent before the first token exists, so that whatever fails until then still gets its
    own HTTP status. What fails later ends a stream with an event that carries the error. By the end
    of an answer its request is over for the server too: the same rid may be used again.
    """

    def __init__(self, generation: Generation, writer: Writer, *, stream: bool) -> None:
        super().__init__()
        self._generation = generation
        self._writer = writer
        self._streamed = stream
        self._rid = generation.rid

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream if self._streamed else self._plain
        try:
            await while_connected(receive, work(scope, receive, send))
        except ClientGoneError:
            log.debug("rid=%s the client went away", self._rid)

    async def _plain(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation:
            async for batch in self._generation:
                self._writer.add(batch)
        headers = {"x-request-id": self._rid}
        await JSONResponse(self._writer.end(), headers=headers)(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with self._generation:
                async for batch in self._generation:
                    events = b"".join(map(_event, self._writer.add(batch)))
                    if not started:
                        await self._start(send)
                        started = True
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            last = self._writer.end()
            tail = _event(last) if last is not None else b""
        except Exception as failure:
            if not started:
                raise
            unexpected = not isinstance(failure, KvweaveError)
            # Its words, not the exception: who keeps the record must not keep the whole request.
            words = str(failure)
            log.warning("rid=%s failed in mid-stream: %s", self._rid, words, exc_info=unexpected)
            tail = _event(body_of(failure))
        if not started:
            await self._start(send)
        tail += b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    async def _start(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # proxies must not wait for the end
            (b"x-request-id", self._rid.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work` unless the client goes first: then it is cancelled and ClientGoneError raised.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
