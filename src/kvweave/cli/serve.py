"""kvweave serve."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from kvweave.cli.flags import takes_settings
from kvweave.cli.session import loading_bar
from kvweave.config import ClusterConfig, EngineConfig, ServerConfig
from kvweave.errors import ConfigError

if TYPE_CHECKING:
    from kvweave.server.model_card import EngineInfo
    from kvweave.server.service import ServingEngine

log = logging.getLogger("kvweave.server")


@takes_settings(config_file=True, engine=EngineConfig, server=ServerConfig, cluster=ClusterConfig)
def serve(
    engine: EngineConfig, server: ServerConfig, cluster: ClusterConfig, given: frozenset[str]
) -> None:
    """Serve a model over an OpenAI-compatible API."""
    from kvweave.server.connections import with_files
    from kvweave.server.logs import configure_logging
    from kvweave.server.run import bind

    configure_logging(server.log_level, server.log_format)
    engine.warn_without_effect(given)
    server = with_files(server)
    listening = bind(server)  # before the model is loaded, which takes a while
    run_engines = _one_engine(engine) if cluster.replicas == 1 else _replicas(engine, cluster)
    with _leaving_on_sigterm(), run_engines as (answering, facts):
        from kvweave.explorer.app import build_app
        from kvweave.server.run import serve as run

        app = build_app(answering, facts.card, server, facts.config, facts.self_check, cluster)
        if server.open:
            log.warning(
                "anyone who reaches %s may use this server: there is no --api-key", server.host
            )

        def ready(url: str) -> None:
            pool = answering.snapshot().total_tokens
            backend = facts.config.cache.prefix_cache_backend
            behind = "" if cluster.replicas == 1 else f"{cluster.replicas} replicas, "
            _say(
                f"kvweave serves {facts.card.name} at {url}/v1 "
                f"({behind}{backend} cache, room for {pool:,} tokens)"
            )

        # Replicas that die are replaced; an engine of this process is not.
        run(app, server, listening, on_ready=ready, leave_with_engine=cluster.replicas == 1)


def _say(line: str) -> None:
    """To whoever reads stdout; a server does not end because nobody can."""
    try:
        typer.echo(line)
    except OSError as failure:
        log.warning("stdout cannot be written (%s): %s", failure.strerror, line)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # or Python would try again at its end


@contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """Who is told to stop unwinds and succeeds, also while loading, and after the drain.

    By default the process would die where it is, and replicas in a cluster would stay; in a
    container, where it is the first process, it would not even die.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _one_engine(config: EngineConfig) -> Iterator[tuple[ServingEngine, EngineInfo]]:
    # Here: they load torch and the models' code, which takes seconds.
    from kvweave.engine.async_engine import AsyncEngine
    from kvweave.engine.engine import Engine
    from kvweave.engine.selfcheck.gate import guarded
    from kvweave.models import load_model
    from kvweave.server.model_card import engine_info

    with loading_bar() as progress:
        loaded = load_model(config.model, progress)
        config, check = guarded(config, loaded, progress)
        engine = AsyncEngine(Engine(config, loaded))
    yield engine, engine_info(loaded, config, check)


@contextmanager
def _replicas(
    config: EngineConfig, cluster: ClusterConfig
) -> Iterator[tuple[ServingEngine, EngineInfo]]:
    try:
        from kvweave.cluster.app import running_engines
    except ModuleNotFoundError as missing:
        raise ConfigError(
            [f"--replicas needs {missing.name}, which pip install 'kvweave[ray]' brings"]
        ) from None
    with running_engines(config, cluster) as (engine, facts):
        yield engine, facts
