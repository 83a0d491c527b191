"""How much a client may send before anyone reads it. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.server.errors import error_response


class BodyLimit:
    """Refuses bodies above `max_bytes`, announced or chunked, and those that take too long to come.

    Answers 413 and 408; and 415 for what is compressed, which could become any size.
    `max_seconds` is counted from the first read to the last byte.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.max_seconds = max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        coding = Headers(scope=scope).get("content-encoding", "identity")
        if coding.strip().lower() not in ("identity", ""):
            words = f"bodies are read as they are: content-encoding {coding[:64]} is not offered"
            await error_response(words, status=415)(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self.max_bytes:
            await error_response(self._too_large(), status=413)(scope, receive, send)
            return
        await self.app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        loop = asyncio.get_running_loop()
        read, complete = 0, False
        deadline: float | None = None

        async def counted() -> Message:
            nonlocal read, complete, deadline
            if complete:  # what follows is the client's leaving, for which one waits without limit
                return await receive()
            if deadline is None:
                deadline = loop.time() + self.max_seconds
            try:
                message = await asyncio.wait_for(receive(), deadline - loop.time())
            except TimeoutError:
                raise HTTPException(
                    408, f"the body did not arrive within {self.max_seconds:g} seconds"
                ) from None
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if read > self.max_bytes:
                    raise HTTPException(413, self._too_large())
            return message

        return counted

    def _too_large(self) -> str:
        return f"the body is larger than this server takes ({self.max_bytes} bytes)"
