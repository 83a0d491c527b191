"""kvweave serve."""

from __future__ import annotations

import logging

import typer

from kvweave.cli.flags import takes_settings
from kvweave.cli.progress import loading_bar
from kvweave.config import EngineConfig, ServerConfig

log = logging.getLogger("kvweave.server")


@takes_settings(engine=EngineConfig, server=ServerConfig)
def serve(engine: EngineConfig, server: ServerConfig) -> None:
    """Serve a model over an OpenAI-compatible API."""
    logging.basicConfig(
        level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from kvweave.server.run import bind

    listening = bind(server)  # before the model is loaded, which takes a while
    # Here: they load torch and the models' code, which takes seconds.
    from kvweave.engine.async_engine import AsyncEngine
    from kvweave.engine.engine import Engine
    from kvweave.engine.selfcheck.gate import guarded
    from kvweave.models import load_model
    from kvweave.server.app import build_app
    from kvweave.server.model_card import card_of
    from kvweave.server.run import serve as run

    with loading_bar() as progress:
        loaded = load_model(engine.model, progress)
        engine, check = guarded(engine, loaded, progress)
        card = card_of(loaded, engine.model.tokenizer)
        answering = AsyncEngine(Engine(engine, loaded))
        app = build_app(answering, card, server, engine, check)
    if server.open:
        log.warning("anyone who reaches %s may use this server: there is no --api-key", server.host)

    def ready(url: str) -> None:
        pool = answering.snapshot().total_tokens
        typer.echo(
            f"kvweave serves {card.name} at {url}/v1 "
            f"({engine.cache.prefix_cache_backend} cache, room for {pool:,} tokens)"
        )

    run(app, server, listening, on_ready=ready)
