"""`kvweave serve`: the HTTP server over one engine or over replicas."""

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
from kvweave.cli.session import check_machine, load_engine
from kvweave.config import ClusterConfig, EngineConfig, ServerConfig
from kvweave.errors import ConfigError, extra
from kvweave.plugins import moving_backends

if TYPE_CHECKING:
    from kvweave.server.model_card import EngineInfo
    from kvweave.server.streaming import ServingEngine

log = logging.getLogger("kvweave.server")


@takes_settings(config_file=True, engine=EngineConfig, server=ServerConfig, cluster=ClusterConfig)
def serve(
    engine: EngineConfig, server: ServerConfig, cluster: ClusterConfig, given: frozenset[str]
) -> None:
    """Serve a model over an OpenAI-compatible API."""
    if cluster.replicas == 1:
        check_machine(engine)
    from kvweave.server.app import bind
    from kvweave.server.connections import with_files
    from kvweave.server.logs import configure_logging

    configure_logging(server.log_level, server.log_format)
    engine.warn_without_effect(given)
    server = with_files(server)
    listening = bind(server)  # before the model is loaded, which takes a while
    with _leaving_on_sigterm(), _engines(engine, cluster) as (answering, facts):
        from kvweave.explorer.routes import build_app
        from kvweave.server.app import serve as run

        app = build_app(answering, facts.card, server, facts.config, facts.self_check, cluster)
        if server.open:
            log.warning(
                "anyone who reaches %s may use this server: there is no --api-key", server.host
            )

        if facts.card.sampling and server.sampling_defaults == "model":
            log.info(
                "requests that do not say otherwise are sampled as the model's generation_config "
                "has it: %s (--sampling-defaults openai: as OpenAI does)",
                ", ".join(f"{name} {value:g}" for name, value in facts.card.sampling.items()),
            )

        def ready(url: str) -> None:
            pool = answering.snapshot().total_tokens
            backend = facts.config.cache.prefix_cache_backend
            behind = "" if cluster.replicas == 1 else f"{cluster.replicas} replicas, "
            _say(
                f"kvweave serves {facts.card.name} at {url}/v1 "
                f"({behind}{backend} cache, room for {pool:,} tokens)"
            )
            if pool // cluster.replicas < facts.card.context_length:
                log.warning(
                    "the KV pool is smaller than the model's context of %s tokens: longer requests "
                    "are refused (--max-total-tokens, --mem-fraction-static)",
                    f"{facts.card.context_length:,}",
                )
            if server.explorer:
                _say(f"what each prompt reused: {url}/explorer")
            if backend not in moving_backends():
                _say(
                    f"{backend} reuses no text at other positions; what does: "
                    f"--prefix-cache-backend {' or '.join(moving_backends())}"
                )

        # Replicas that die are replaced; an engine of this process is not.
        run(app, server, listening, on_ready=ready, leave_with_engine=cluster.replicas == 1)


def _say(line: str) -> None:
    """Print to stdout; a closed stdout does not end the server."""
    try:
        typer.echo(line)
    except OSError as failure:
        log.warning("stdout cannot be written (%s): %s", failure.strerror, line)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # Python flushes stdout at exit


@contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the process and exits with 0, also while the model loads.

    By default SIGTERM kills the process on the spot and leaves its replicas in the cluster. The
    first process of a container ignores it.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _engines(
    config: EngineConfig, cluster: ClusterConfig
) -> Iterator[tuple[ServingEngine, EngineInfo]]:
    """One engine of this process, or replicas."""
    if cluster.replicas == 1:
        yield load_engine(config)
        return
    try:
        from kvweave.cluster.app import running_engines
    except ModuleNotFoundError as missing:
        raise ConfigError(
            [f"--replicas needs {missing.name}, which {extra('ray')} brings"]
        ) from None
    with running_engines(config, cluster) as (engine, facts):
        yield engine, facts
