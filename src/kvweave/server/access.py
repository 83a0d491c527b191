"""Access control: levels and API keys, the guard against other sites' pages, limits on bodies."""

from __future__ import annotations

import asyncio
import hmac
import socket
from enum import Enum
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.config import ServerConfig
from kvweave.server.errors import error_response

OPEN_PATHS = frozenset({"/health", "/", "/explorer"})
"""Need no key: load balancers ask for /health; / leads to /explorer, which asks for the key."""
OPEN_FOLDER = "/explorer/static/"
"""The files of that page."""
CLIENTS_PATHS = frozenset(
    {
        "/generate",
        "/tokenize",
        "/detokenize",
        "/close_session",
        "/health_generate",
        "/model_info",
        "/get_model_info",
        "/openapi.json",
    }
)
CLIENTS_FOLDER = "/v1/"


class AccessLevel(Enum):
    """Whose key opens a path. Paths that are not listed are the operators'."""

    OPEN = "open"
    CLIENT = "client"
    OPERATOR = "operator"

    @classmethod
    def to(cls, path: str) -> AccessLevel:
        """The level of a path as it is routed, without escapes."""
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
        """Whether operators have a key of their own."""
        return self._operators is not None

    def for_level(self, level: AccessLevel) -> list[bytes]:
        """The keys that open `level`; an empty list if it needs none."""
        if level is AccessLevel.OPEN or (level is AccessLevel.CLIENT and self._clients is None):
            return []
        keys = [self._operators]
        if level is AccessLevel.CLIENT or self._operators is None:
            keys.append(self._clients)
        return [key for key in keys if key is not None]

    def is_known(self, key: bytes, among: list[bytes]) -> bool:
        """Compares in constant time, so that response times do not reveal a key."""
        return any(hmac.compare_digest(key, known) for known in among)


class KeyGate:
    """Requires a key of the path's level: else 401 or 403.

    It comes as `Authorization: Bearer KEY`, or as `x-api-key: KEY`, which Anthropic's clients send.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            fitting = self._keys.for_level(AccessLevel.to(scope["path"]))
            key = _sent_key(scope)
            if fitting and not self._keys.is_known(key, fitting):
                is_clients = self._keys.is_known(key, self._keys.for_level(AccessLevel.CLIENT))
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


def _sent_key(scope: Scope) -> bytes:
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip().encode("latin-1")


def _bytes(key: str | None) -> bytes | None:
    return None if key is None else key.encode()


class CsrfGuard:
    """Answers 403 to what another site's page makes a browser ask, where no key is needed.

    A key is protection enough: other pages do not have it. Without one, two attacks remain:

    - DNS rebinding: the page's own name is made to resolve to this machine, so that the browser
      takes the server for the page's origin. The name is in the header Host.
    - cross-site requests: browsers name their origin in Sec-Fetch-Site, which pages cannot set,
      or, where they do not send that (plain HTTP to another machine), in Origin.

    Programs send neither of the last two, and call the server by a name or address of its own.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: Keys) -> None:
        self.app = app
        self._hosts = _HostNames(config)
        self._origins = frozenset(config.origins)
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        level = AccessLevel.to(scope["path"]) if scope["type"] == "http" else AccessLevel.OPEN
        app = self.app
        if level is not AccessLevel.OPEN and not self._keys.for_level(level):
            headers = Headers(scope=scope)
            if headers.get("host", "") not in self._hosts:
                app = _OTHER_NAME
            elif not self._is_own_page(headers):
                app = _OTHER_SITE
        await app(scope, receive, send)

    def _is_own_page(self, headers: Headers) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and not self._origins.isdisjoint((origin, "*")):
            return True
        if site is not None:
            return site in ("same-origin", "none")
        return origin is None or origin.partition("://")[2] == headers.get("host", "")


class _HostNames:
    """The names and addresses by which this server may be called, as Host has them.

    Rebinding needs a name that an attacker can register: addresses are none. A server that
    listens on the loopback only is still not called by other machines' addresses.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._loopback_only = config.is_loopback
        self._any = "*" in config.hosts
        names = {"localhost", config.host.lower(), *config.hosts}
        if not config.is_loopback:
            names.add(socket.gethostname().lower())
        self._names = {name for name in names if not name.startswith("*")}
        # Nobody can register names under these two; containers call their host by the second.
        suffixes = (name[1:] for name in config.hosts if name.startswith("*."))
        self._suffixes = (".localhost", ".internal", *suffixes)

    def __contains__(self, authority: str) -> bool:
        """`authority` is the header's value: a name or address, perhaps with a port."""
        try:
            name = (urlsplit(f"//{authority}").hostname or "").removesuffix(".")
        except ValueError:  # unpaired brackets
            return False
        if self._any or name in self._names or name.endswith(self._suffixes):
            return True
        try:
            return ip_address(name).is_loopback or not self._loopback_only
        except ValueError:
            return False


_OTHER_NAME = error_response(
    "without a key, this server answers only to names of its own (the header Host has another "
    "one): start it with --allowed-hosts NAME or with --api-key",
    status=403,
    code="foreign_host",
)
_OTHER_SITE = error_response(
    "without a key, a page of another site may not use this server through its visitors' "
    "browsers: start it with --allowed-origins ORIGIN or with --api-key",
    status=403,
    code="foreign_page",
)


class BodyLimit:
    """Limits request bodies to `max_bytes`, announced or chunked, and to `max_seconds`.

    Answers 413 and 408, and 415 for compressed bodies, whose size is unknown. `max_seconds` counts
    from the first read to the last byte.
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
            if complete:  # the next message is the disconnect, which has no time limit
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
