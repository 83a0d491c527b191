"""Error responses in OpenAI's shape: `{"error": {message, type, param, code}}`.

Under /v1/messages they are Anthropic's: `{"type": "error", "error": {type, message}}`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.errors import EngineDeadError, KvweaveError, OverloadedError, RequestError
from kvweave.server.logs import current_rid

log = logging.getLogger("kvweave.server")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_UNREADABLE: tuple[tuple[type[Exception], str], ...] = (
    (UnicodeDecodeError, "the body is not valid UTF-8"),
    (RecursionError, "the body is nested too deeply"),
    (ValueError, "the body holds a number too long to read"),
)


_UNEXPECTED = "the server failed on this request; its log says why"


class AnswerFailedError(KvweaveError):
    """The engine gave up on a request that it had accepted; the message says why."""


def error_body(
    message: str, *, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object; its type follows from the HTTP status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message, param = _writable(message), param and _writable(param)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _writable(text: str) -> str:
    """`text` in one line, without halves of surrogate pairs, since it may quote the request."""
    return " ".join(text.encode("utf-8", "replace").decode().splitlines())


def body_of(failure: Exception) -> dict[str, Any]:
    """The error object of any failure, such as one in mid-stream."""
    if isinstance(failure, RequestError):
        return error_body(
            failure.message, status=failure.status, param=failure.param, code=failure.code
        )
    if isinstance(failure, KvweaveError):
        return error_body(str(failure), status=500)
    return error_body(_UNEXPECTED, status=500)


def error_response(
    message: str,
    *,
    status: int,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """A whole HTTP response in OpenAI's error shape."""
    body = error_body(message, status=status, param=param, code=code)
    return JSONResponse(body, status_code=status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Make every error response of `app` take this shape."""
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(EngineDeadError, _engine_dead)
    app.add_exception_handler(AnswerFailedError, _answer_failed)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(LastResort)


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(body: dict[str, Any], status: int) -> dict[str, Any]:
    """Anthropic's error object for one of OpenAI's; `param` and `code` stay."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {**body["error"], "type": kind}}


class AnthropicErrors:
    """Gives errors under /v1/messages Anthropic's shape, whichever layer they come from."""

    PATH = "/v1/messages"

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None

        async def shaped(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
            elif start is None:
                await send(message)
            else:  # error responses are sent in one piece
                status = start["status"]
                body = json.dumps(anthropic_error(json.loads(message["body"]), status)).encode()
                length = (b"content-length", str(len(body)).encode())
                kept = [header for header in start["headers"] if header[0] != b"content-length"]
                await send({**start, "headers": [*kept, length]})
                await send({**message, "body": body})

        anthropics = scope["type"] == "http" and scope["path"].startswith(self.PATH)
        await self.app(scope, receive, shaped if anthropics else send)


class LastResort:
    """Answers 500 to unexpected exceptions and keeps the connection open.

    An exception handler for Exception raises again after its response, which closes a connection
    that the client is about to reuse.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        current_rid.set(None)  # a connection's next request may be read in its last one's task

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            if scope["type"] != "http" or started:
                raise
            log.exception("%s %s failed", scope["method"], scope["path"])
            await error_response(_UNEXPECTED, status=500)(scope, receive, send)


async def _request_error(request: Request, failure: Exception) -> JSONResponse:
    assert isinstance(failure, RequestError)
    headers = None
    if isinstance(failure, OverloadedError):
        headers = {"Retry-After": str(max(1, round(failure.retry_after)))}
    return JSONResponse(body_of(failure), status_code=failure.status, headers=headers)


async def _engine_dead(request: Request, failure: Exception) -> JSONResponse:
    return error_response(str(failure), status=503, code="engine_dead")


async def _answer_failed(request: Request, failure: Exception) -> JSONResponse:
    return error_response(str(failure), status=500, code="answer_failed")


async def _http_error(request: Request, failure: Exception) -> JSONResponse:
    assert isinstance(failure, HTTPException)
    path = request.url.path
    message = failure.detail
    if failure.status_code == 404:
        message = f"there is nothing at {path}"
    elif failure.status_code == 405:
        message = f"{path} does not answer {request.method}"
    elif isinstance(failure.__cause__, Exception):
        message = next(
            (text for kind, text in _UNREADABLE if isinstance(failure.__cause__, kind)), message
        )
    headers = dict(failure.headers) if failure.headers else None
    return error_response(message, status=failure.status_code, headers=headers)


async def _validation_error(request: Request, failure: Exception) -> JSONResponse:
    assert isinstance(failure, RequestValidationError)
    problems = failure.errors()
    message = "; ".join(_problem(problem) for problem in problems[:5])
    if len(problems) > 5:
        message += f"; and {len(problems) - 5} more"
    return error_response(message, status=400, param=_param(problems[0]["loc"]))


def _problem(problem: dict[str, Any]) -> str:
    kind, where = problem["type"], _param(problem["loc"])
    if kind == "json_invalid":
        position = problem["loc"][-1]
        return f"the body is not valid JSON, at character {position}: {problem['ctx']['error']}"
    if kind == "value_error":
        return f"{where or 'the body'}: {problem['ctx']['error']}"
    if where is None:
        if kind == "missing":
            return "the body is missing: send a JSON object"
        return "the body must be a JSON object, sent as application/json"
    if kind == "missing":
        return f"{where} is missing"
    return f"{where}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def _param(location: Sequence[int | str]) -> str | None:
    """The field as the client wrote it: messages.0.content; None for the body as a whole."""
    inside = location[1:] if location and location[0] in ("body", "query", "path") else location
    if not inside or isinstance(inside[0], int):
        return None
    return ".".join(str(part) for part in inside)
