"""The application: routes, gates and error shape around one engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

import kvweave
from kvweave.config import ClusterConfig, EngineConfig, ServerConfig
from kvweave.server.admin import admin_router
from kvweave.server.chat import chat_router
from kvweave.server.completions import completions_router
from kvweave.server.errors import install_error_handlers
from kvweave.server.explorer.routes import explorer_router
from kvweave.server.foreign import NoForeignPages
from kvweave.server.keys import KeyGate, Keys
from kvweave.server.limits import BodyLimit
from kvweave.server.model_card import ModelCard
from kvweave.server.openapi import describe
from kvweave.server.service import Service, ServingEngine
from kvweave.server.tokenization import tokenization_router

if TYPE_CHECKING:
    from kvweave.engine.selfcheck.gate import SelfCheck

log = logging.getLogger("kvweave.server")

_STOP_SECONDS = 10.0
"""For an engine to end its step; one that hangs in it is left behind."""


def build_app(
    engine: ServingEngine,
    card: ModelCard,
    config: ServerConfig,
    engine_config: EngineConfig | None = None,
    self_check: SelfCheck | None = None,
    cluster: ClusterConfig | None = None,
) -> FastAPI:
    """An ASGI application that answers for `engine`, which it starts and stops with itself.

    `app.state.service` is the Service behind the routes. `engine_config`, `self_check` and
    `cluster` are only shown.
    """
    service = Service(engine, card, config)
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
        version=kvweave.__version__,
        lifespan=lifespan,
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        strict_content_type=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.service = service
    install_error_handlers(app)
    app.include_router(completions_router(service))
    app.include_router(chat_router(service))
    app.include_router(tokenization_router(service))
    app.include_router(admin_router(service, engine_config, self_check, cluster))
    if service.history is not None:
        backend = engine_config.cache.prefix_cache_backend
        app.include_router(explorer_router(service, service.history, backend))
    keys = Keys(config)
    describe(app, keys)
    app.add_middleware(
        BodyLimit, max_bytes=config.max_body_bytes, max_seconds=config.client_seconds
    )
    if keys.any:
        app.add_middleware(KeyGate, keys=keys)
    app.add_middleware(NoForeignPages)
    return app


async def _stop(engine: ServingEngine) -> None:
    try:
        await asyncio.wait_for(engine.stop(), _STOP_SECONDS)
    except TimeoutError:
        log.error("the engine did not stop within %g seconds and is left behind", _STOP_SECONDS)
