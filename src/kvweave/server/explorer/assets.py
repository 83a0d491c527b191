"""The page's own files: read once, served with a policy that lets nothing else run."""

from __future__ import annotations

import hashlib
import mimetypes
from functools import cache
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def _contents() -> dict[str, tuple[bytes, str, str]]:
    """By name: bytes, media type and tag of every file of the page."""
    found = {}
    for file in files(__package__).joinpath("static").iterdir():
        content = file.read_bytes()
        # Not the system's table of types, which may call a script anything.
        kind = "text/javascript" if file.name.endswith(".js") else None
        kind = kind or mimetypes.guess_type(file.name)[0] or "text/plain"
        tag = f'"{hashlib.blake2s(content, digest_size=8).hexdigest()}"'
        found[file.name] = content, kind, tag
    return found


def asset(name: str, request: Request) -> Response:
    """One file of the page; 404 if it has no such file, 304 if the browser has it."""
    if name not in _contents():
        raise HTTPException(404)
    content, kind, tag = _contents()[name]
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": tag,
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=f"{kind}; charset=utf-8", headers=headers)
