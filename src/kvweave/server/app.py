"""The HTTP server: the application around one engine, its OpenAPI document, socket and life."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware

from kvweave.config import ClusterConfig, EngineConfig, ServerConfig
from kvweave.errors import ConfigError, EngineDeadError
from kvweave.server import schemas
from kvweave.server.access import AccessLevel, BodyLimit, CsrfGuard, KeyGate, Keys
from kvweave.server.connections import Connection, ConnectionLimiter
from kvweave.server.errors import AnthropicErrors, install_error_handlers
from kvweave.server.metrics import RefusalCounter, RequestObserver
from kvweave.server.model_card import ModelCard
from kvweave.server.routes.admin import admin_router
from kvweave.server.routes.completions import (
    chat_router,
    completions_router,
    embeddings_router,
    tokenization_router,
)
from kvweave.server.routes.generate import generate_router
from kvweave.server.routes.messages import messages_router
from kvweave.server.routes.responses import responses_router
from kvweave.server.service import Service
from kvweave.server.streaming import ServingEngine
from kvweave.version import __version__

if TYPE_CHECKING:
    from kvweave.engine.selfcheck.gate import SelfCheck


log = logging.getLogger("kvweave.server")

_STOP_SECONDS = 10.0
"""How long to wait for the engine to end its step."""


def build_api(
    engine: ServingEngine,
    card: ModelCard,
    config: ServerConfig,
    engine_config: EngineConfig | None = None,
    self_check: SelfCheck | None = None,
    cluster: ClusterConfig | None = None,
    *,
    observer: RequestObserver | None = None,
    more_routes: Callable[[Service], APIRouter] | None = None,
) -> FastAPI:
    """An ASGI application that serves `engine`, and starts and stops it with itself.

    `app.state.service` is the Service behind the routes. `engine_config`, `self_check` and
    `cluster` are only shown. `observer` gets every prompt that has ended; `more_routes` adds routes
    behind the same middleware.
    """
    service = Service(engine, card, config, observer)
    engine_config = engine_config or EngineConfig()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await _stop(engine)

    app = FastAPI(
        title="kvweave",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        strict_content_type=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.service = service
    install_error_handlers(app)
    app.include_router(completions_router(service))
    app.include_router(chat_router(service))
    app.include_router(responses_router(service))
    app.include_router(messages_router(service))
    app.include_router(generate_router(service))
    app.include_router(embeddings_router(service, engine_config.fuzzy.semantic_embedder))
    app.include_router(tokenization_router(service))
    app.include_router(admin_router(service, engine_config, self_check, cluster))
    if more_routes is not None:
        app.include_router(more_routes(service))
    keys = Keys(config)
    describe(app, keys)
    app.add_middleware(
        BodyLimit, max_bytes=config.max_body_bytes, max_seconds=config.client_seconds
    )
    if keys.any:
        app.add_middleware(KeyGate, keys=keys)
    app.add_middleware(CsrfGuard, config=config, keys=keys)
    if config.origins:  # outside the gates: browsers ask for permission without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    app.add_middleware(AnthropicErrors)
    app.add_middleware(RefusalCounter, metrics=service.metrics)
    return app


async def _stop(engine: ServingEngine) -> None:
    try:
        await asyncio.wait_for(engine.stop(), _STOP_SECONDS)
    except TimeoutError:
        log.error("the engine did not stop within %g seconds and is left behind", _STOP_SECONDS)


_FLUSH_SECONDS = 5.0
"""For aborted answers to reach their clients, after the drain's deadline."""
_KERNEL_BUFFER = 2**17
"""Bytes of an answer that the kernel keeps for its reader; Linux doubles the figure."""
_POLL_SECONDS = 0.05
"""Between two checks whether a second signal came."""


def bind(config: ServerConfig) -> socket.socket:
    """A socket bound to the configured address; ConfigError if that is not possible.

    Done before anything slow, such as loading a model.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it; by default the kernel buffers megabytes for a reader that stalls.
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER)
    try:
        taken.bind((config.host, config.port))
    except OSError as failure:
        taken.close()
        raise ConfigError(
            [
                f"cannot listen on {config.host} port {config.port} "
                f"({failure.strerror or failure}); --host and --port name another place"
            ]
        ) from None
    return taken


def url_of(listening: socket.socket) -> str:
    """The URL under which clients on this machine reach the socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: FastAPI,
    config: ServerConfig,
    listening: socket.socket,
    *,
    on_ready: Callable[[str], None] = lambda url: None,
    leave_with_engine: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish what runs, within the drain's deadline.

    A second signal ends the drain at once, a third the process. With `leave_with_engine` it also
    ends, by EngineDeadError, when the engine has stopped for good, so that a supervisor can start
    another process.
    """
    server = DrainingServer(app, config, on_ready, leave_with_engine)
    server.run(sockets=[listening])
    if server.engine_died:
        raise EngineDeadError("the engine has stopped for good, and so has the server")


class DrainingServer(uvicorn.Server):
    """A uvicorn server that, on shutdown, lets running answers finish and then aborts the rest.

    Aborted answers still end properly; uvicorn alone would cut them off in the middle of a line.
    """

    def __init__(
        self,
        app: FastAPI,
        config: ServerConfig,
        on_ready: Callable[[str], None],
        leave_with_engine: bool = False,
    ) -> None:
        limiter = ConnectionLimiter(app, config.max_connections)
        connection = partial(Connection, limiter=limiter, client_seconds=config.client_seconds)
        super().__init__(
            uvicorn.Config(
                app,
                http=connection,  # type: ignore[arg-type]
                timeout_keep_alive=config.keep_alive_seconds,  # type: ignore[arg-type]
                log_config=None,
                access_log=config.log_level == "debug",
                timeout_graceful_shutdown=round(config.drain_seconds + _FLUSH_SECONDS),
                ws="none",
                server_header=False,
            )
        )
        self._service: Service = app.state.service
        self._drain_seconds = config.drain_seconds
        self._on_ready = on_ready
        self._leave_with_engine = leave_with_engine
        self._hurry = False
        self.engine_died = False
        """Whether the server stops because the engine has."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif not self._hurry:
            self._hurry = True  # polled by the drain
        else:
            self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets:
            self._on_ready(url_of(sockets[0]))

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; uvicorn calls this ten times a second."""
        if self._leave_with_engine and not self._service.engine.alive and not self.should_exit:
            self.engine_died = True
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        deadline = asyncio.create_task(self._end_drain())
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await deadline

    async def _end_drain(self) -> None:
        """Abort all live generations at the drain's deadline."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._drain_seconds
        while not self._hurry and clock() < deadline:
            await asyncio.sleep(min(_POLL_SECONDS, max(deadline - clock(), 0.0)))
        self._service.live.abort()


_REFUSALS = {
    400: "The request cannot be served as asked; `param` names the field.",
    401: "No key, or a wrong one.",
    403: "The operators' key is needed, not the clients'.",
    404: "Unknown path or model.",
    408: "The body did not arrive in time.",
    409: "Not possible while requests run.",
    413: "The body is larger than this server takes.",
    415: "The body is compressed.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "The engine or the server failed on this request; the others go on.",
    501: "The package of the embedder is not installed.",
    503: "The engine has stopped, the server is shutting down, or too many connections are open.",
}
_ALWAYS = (500, 503)
_WITH_PARAMETERS = (400,)
_WITH_A_BODY = (400, 408, 413, 415)
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string"}}}


def describe(app: FastAPI, keys: Keys) -> None:
    """Make `app` publish its document with all error responses in this server's shape."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            with warnings.catch_warnings():  # two methods share a name until _completed
                warnings.filterwarnings("ignore", message="Duplicate Operation ID")
                document = generate()
            app.openapi_schema = _completed(document, keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _completed(document: dict[str, Any], keys: Keys) -> dict[str, Any]:
    components = document["components"]
    components["schemas"] |= _shapes()
    for theirs in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(theirs, None)
    if keys.any:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if len(operations) > 1:
                operation["operationId"] = f"{method}_{operation['operationId']}"
            _complete(operation, AccessLevel.to(path), keys)
    return document


def _complete(operation: dict[str, Any], level: AccessLevel, keys: Keys) -> None:
    named = operation.pop("responses")
    operation["responses"] = responses = {"200": named.pop("200")}
    named.pop("422", None)  # FastAPI's own; validation errors are 400 here
    statuses = {*map(int, named), *_ALWAYS}
    if "parameters" in operation:
        statuses |= set(_WITH_PARAMETERS)
    if "requestBody" in operation:
        statuses |= set(_WITH_A_BODY)
    if keys.for_level(level):
        statuses |= {401, 403} if keys.two and level is AccessLevel.OPERATOR else {401}
        operation["security"] = [{"key": []}]
    for status in sorted(statuses):
        responses[str(status)] = {
            "description": _REFUSALS[status],
            "content": {"application/json": {"schema": schemas.reference(schemas.ErrorAnswer)}},
            **({"headers": _RETRY} if status == 429 else {}),
        }


def _shapes() -> dict[str, Any]:
    """Schemas that no route names as its response: errors and events of streams."""
    unnamed: list[type[BaseModel]] = [
        *(schemas.ErrorAnswer, schemas.ChatCompletionChunk),
        *(schemas.NamedEvent, schemas.GeneratedText),
    ]
    _, document = models_json_schema(
        [(shape, "serialization") for shape in unnamed], ref_template=schemas.REFERENCE
    )
    found: dict[str, Any] = document["$defs"]
    return found
