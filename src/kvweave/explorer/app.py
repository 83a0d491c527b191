"""Builds the whole application: the API and, if enabled, the explorer."""

from __future__ import annotations

from fastapi import FastAPI

from kvweave.config import ClusterConfig, EngineConfig, ServerConfig
from kvweave.engine.selfcheck.gate import SelfCheck
from kvweave.explorer.history import History
from kvweave.explorer.routes import explorer_router
from kvweave.server.app import build_api
from kvweave.server.model_card import ModelCard
from kvweave.server.streaming import ServingEngine


def build_app(
    engine: ServingEngine,
    card: ModelCard,
    config: ServerConfig,
    engine_config: EngineConfig | None = None,
    self_check: SelfCheck | None = None,
    cluster: ClusterConfig | None = None,
) -> FastAPI:
    """As `build_api`; with `config.explorer` also the explorer and its history of prompts."""
    if not config.explorer:
        return build_api(engine, card, config, engine_config, self_check, cluster)
    history = History()
    backend = (engine_config or EngineConfig()).cache.prefix_cache_backend
    return build_api(
        engine,
        card,
        config,
        engine_config,
        self_check,
        cluster,
        observer=history,
        more_routes=lambda service: explorer_router(service, history, backend),
    )
