"""Who may ask what: nobody's key, a client's, or an operator's.

What an operator asks tells of everybody (the explorer, metrics, settings) or touches everybody
(flushing, aborting). With a key of its own, clients' key does not open it.
"""

from __future__ import annotations

import hmac
from enum import Enum

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.config import ServerConfig
from kvweave.server.errors import error_response

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


class Door(Enum):
    """Whose key opens a path. What nobody thought of is an operator's."""

    OPEN = "open"
    CLIENT = "client"
    OPERATOR = "operator"

    @classmethod
    def to(cls, path: str) -> Door:
        """Of a path as it is routed, without escapes."""
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return cls.OPEN
        if path in CLIENTS_PATHS or path.startswith(CLIENTS_FOLDER):
            return cls.CLIENT
        return cls.OPERATOR


class Keys:
    """Which keys open which door."""

    def __init__(self, config: ServerConfig) -> None:
        self._clients = _bytes(config.api_key)
        self._operators = _bytes(config.admin_api_key)
        self.any = bool(self._clients or self._operators)

    @property
    def two(self) -> bool:
        """Clients are not let in everywhere."""
        return self._operators is not None

    def for_door(self, door: Door) -> list[bytes]:
        """Any of these will do; none are needed if there are none."""
        if door is Door.OPEN or (door is Door.CLIENT and self._clients is None):
            return []
        keys = [self._operators]
        if door is Door.CLIENT or self._operators is None:
            keys.append(self._clients)
        return [key for key in keys if key is not None]

    def is_known(self, key: bytes, among: list[bytes]) -> bool:
        """In constant time, so that nobody learns a key letter by letter from how long it takes."""
        return any(hmac.compare_digest(key, known) for known in among)


class KeyGate:
    """Lets nobody in without `Authorization: Bearer KEY`, with a key for that door."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            fitting = self._keys.for_door(Door.to(scope["path"]))
            key = _sent(scope)
            if fitting and not self._keys.is_known(key, fitting):
                is_clients = self._keys.is_known(key, self._keys.for_door(Door.CLIENT))
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
