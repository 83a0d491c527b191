"""What pages of other sites may make a browser ask: nothing but what is open to everyone.

Without a key, whoever reaches the port may use the server, and so might, through the browser of
somebody who does, any page visited with it: flush the cache, end answers. Browsers tell who is
behind a request in Sec-Fetch-Site; programs send no such header.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.server.errors import error_response
from kvweave.server.keys import Door

_FOREIGN = frozenset({"cross-site", "same-site"})
"""The latter is another port of this machine, or a sister of its name."""


class NoForeignPages:
    """Answers 403 to a browser that asks on behalf of another site."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = (
            scope["type"] == "http"
            and Headers(scope=scope).get("sec-fetch-site") in _FOREIGN
            and Door.to(scope["path"]) is not Door.OPEN
        )
        await (_REFUSAL if refused else self.app)(scope, receive, send)


_REFUSAL = error_response(
    "a page of another site may not use this server through its visitors' browsers: put a server "
    "of your own in between",
    status=403,
    code="foreign_page",
)
