"""What pages of other sites may make a browser ask: nothing but what is open to everyone.

Without a key, whoever reaches the port may use the server, and so might, through the browser of
somebody who does, any page visited with it: flush the cache, end answers. Browsers tell who is
behind a request in Sec-Fetch-Site; programs send no such header.
"""

from __future__ import annotations

import asyncio
import hmac
from enum import Enum

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.config import ServerConfig
from kvweave.server.errors import error_response

_FOREIGN = frozenset({"cross-site", "same-site"})
"""The latter is another port of this machine, or a sister of its name."""


class CsrfGuard:
    """Answers 403 to a browser that asks on behalf of another site."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = (
            scope["type"] == "http"
            and Headers(scope=scope).get("sec-fetch-site") in _FOREIGN
            and AccessLevel.to(scope["path"]) is not AccessLevel.OPEN
        )
        await (_REFUSAL if refused else self.app)(scope, receive, send)


_REFUSAL = error_response(
    "a page of another site may not use this server through its visitors' browsers: put a server "
    "of your own in between",
    status=403,
    code="foreign_page",
)


OPEN_PATHS = frozenset({"/health", "/explorer"})
"""Answered without a key: a load balancer asks them, and a browser for the page that asks a key."""
OPEN_FOLDER = "/explorer/static/"
"""What that page is made of."""
CLIENTS_PATHS = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/health_generate",
        "/model_info",
        "/get_model_info",
        "/openapi.json",
    }
)
CLIENTS_FOLDER = "/v1/"


class AccessLevel(Enum):
    """Whose key opens a path. What nobody thought of is an operator's."""

    OPEN = "open"
    CLIENT = "client"
    OPERATOR = "operator"

    @classmethod
    def to(cls, path: str) -> AccessLevel:
        """Of a path as it is routed, without escapes."""
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return cls.OPEN
        if path in CLIENTS_PATHS or path.startswith(CLIENTS_FOLDER):
            return cls.CLIENT
        return cls.OPERATOR


class Keys:
    """Which keys open which level."""

    def __init__(self, config: ServerConfig) -> None:
        self._clients = _bytes(config.api_key)
        self._operators = _bytes(config.admin_api_key)
        self.any = bool(self._clients or self._operators)

    @property
    def two(self) -> bool:
        """Clients are not let in everywhere."""
        return self._operators is not None

    def for_door(self, level: AccessLevel) -> list[bytes]:
        """Any of these will do; none are needed if there are none."""
        if level is AccessLevel.OPEN or (level is AccessLevel.CLIENT and self._clients is None):
            return []
        keys = [self._operators]
        if level is AccessLevel.CLIENT or self._operators is None:
            keys.append(self._clients)
        return [key for key in keys if key is not None]

    def is_known(self, key: bytes, among: list[bytes]) -> bool:
        """In constant time, so that nobody learns a key letter by letter from how long it takes."""
        return any(hmac.compare_digest(key, known) for known in among)


class KeyGate:
    """Lets nobody in without `Authorization: Bearer KEY`, with a key for that level."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            fitting = self._keys.for_door(AccessLevel.to(scope["path"]))
            key = _sent(scope)
            if fitting and not self._keys.is_known(key, fitting):
                is_clients = self._keys.is_known(key, self._keys.for_door(AccessLevel.CLIENT))
                await (_OTHER_KEY if is_clients else _NO_KEY)(scope, receive, send)
                return
        await self.app(scope, receive, send)


_NO_KEY = error_response(
    "this server wants an API key: send the header 'Authorization: Bearer KEY' with a valid one",
    status=401,
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
_OTHER_KEY = error_response(
    "this is for the server's operators, who have a key of their own (--admin-api-key)",
    status=403,
    code="operators_only",
)


def _sent(scope: Scope) -> bytes:
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def _bytes(key: str | None) -> bytes | None:
    return None if key is None else key.encode()


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
