"""Builds the ASGI application: routes, middleware and error handlers around one engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from kvweave.config import ClusterConfig, EngineConfig, ServerConfig
from kvweave.server.access import BodyLimit, CsrfGuard, KeyGate, Keys
from kvweave.server.errors import AnthropicErrors, install_error_handlers
from kvweave.server.metrics import RefusalCounter
from kvweave.server.model_card import ModelCard
from kvweave.server.request_metrics import RequestObserver
from kvweave.server.routes.admin import admin_router
from kvweave.server.routes.chat import chat_router
from kvweave.server.routes.completions import completions_router, tokenization_router
from kvweave.server.routes.embeddings import embeddings_router
from kvweave.server.routes.generate import generate_router
from kvweave.server.routes.messages import messages_router
from kvweave.server.routes.responses import responses_router
from kvweave.server.schemas import describe
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
