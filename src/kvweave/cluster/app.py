"""Ray Serve applications: engines alone, and engines behind the HTTP server.

`serve run kvweave.cluster.app:app replicas=2 prefix_cache_backend=fuzzy_match` runs the second one;
its arguments are the flags of `kvweave serve`, with underscores.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.cluster.replica import EngineReplica, RemoteEngine
from kvweave.config import ClusterConfig, EngineConfig, ServerConfig, validate
from kvweave.config.base import kinds_of, make, read
from kvweave.errors import ConfigError, UnsupportedModelError, reason
from kvweave.server.model_card import EngineInfo


def engines(
    config: EngineConfig, cluster: ClusterConfig, router: RequestRouterConfig | None = None
) -> Application:
    """Replicas of one engine behind the router that follows their caches.

    `router`: another one, for comparisons. Raises ConfigError for settings that do not fit.
    """
    config.validate()
    validate(cluster)
    if config.cache.kv_events_config is not None:
        raise ConfigError(
            ["--kv-events-config is for one engine: replicas publish to their router by themselves"]
        )
    deployment = serve.deployment(
        EngineReplica,
        name="engine",
        num_replicas=cluster.replicas,
        # Above the engine's own limits, so that the engine queues and refuses.
        max_ongoing_requests=config.scheduler.max_running_requests
        + config.scheduler.max_queued_requests
        + 1,
        ray_actor_options={
            "num_cpus": cluster.cpus_per_replica,
            "num_gpus": cluster.gpus_per_replica,
        },
        request_router_config=router
        or RequestRouterConfig(request_router_class="kvweave.cluster.router:OverlapRouter"),
        health_check_period_s=5.0,
    )
    threads = max(1, int(cluster.cpus_per_replica)) if config.model.device != "cuda" else None
    return deployment.bind(config, threads)


_KEYS = ("api_key", "admin_api_key")
_RAYS = (
    *("host", "port", "max_connections", "keep_alive_seconds", "drain_seconds"),
    *("log_level", "log_format", "ray_address"),
)
"""Settings without a meaning behind Serve's own proxies."""


class Ingress:
    """The HTTP server of `kvweave serve`, with engines in other processes."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, handle: Any, server: ServerConfig, cluster: ClusterConfig
    ) -> None:
        from kvweave.cluster.replica import RemoteEngine
        from kvweave.explorer.routes import build_app

        facts = await handle.facts.remote()
        self._engine = RemoteEngine(handle, facts)
        await self._engine.start()
        self._app = build_app(
            self._engine, facts.card, server, facts.config, facts.self_check, cluster
        )

    async def __call__(self, request: Request) -> Response:
        return _Through(self._app)


class _Through(Response):
    """A response that an ASGI application sends."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def app(arguments: dict[str, Any]) -> Application:
    """For `serve run` and Serve's YAML files. API keys may also come from the environment."""
    keys = {name: os.environ.get(f"KVWEAVE_{name.upper()}") for name in _KEYS}
    config, cluster, server = settings({**keys, **arguments})
    ingress = serve.deployment(
        Ingress, name="http", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
    )
    return ingress.bind(engines(config, cluster), server, cluster)


def settings(arguments: dict[str, Any]) -> tuple[EngineConfig, ClusterConfig, ServerConfig]:
    """Settings by name, as texts or values; ConfigError lists all problems."""
    problems = [
        f"{name} is not set here, but in Ray's settings" for name in _RAYS if name in arguments
    ]
    left = [(name, value) for name, value in arguments.items() if name not in _RAYS]
    groups = (EngineConfig, ClusterConfig, ServerConfig)
    values = read(left, kinds_of(*groups), problems)
    config, cluster, server = make(groups, values, problems)
    config.warn_without_effect(values)
    if not server.has_key:  # Serve's proxies choose the address
        server = replace(server, host="0.0.0.0", explorer_hide_text=True)
    return config, cluster, server


_NAME = "kvweave"
"""Name of the Serve application."""


@contextmanager
def running_engines(
    config: EngineConfig, cluster: ClusterConfig, router: RequestRouterConfig | None = None
) -> Iterator[tuple[RemoteEngine, EngineInfo]]:
    """Running replicas, within the block.

    Starts Ray on this machine's loopback, unless there is a cluster to join, and stops it at the
    end. `router`: another one, for comparisons. Raises ConfigError, UnsupportedModelError.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if cluster.ray_address is None:
        ray.init(
            include_dashboard=False,
            logging_level=logging.WARNING,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
        )
    else:
        ray.init(address=cluster.ray_address, logging_level=logging.WARNING)
    try:
        _check_room(cluster)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        try:
            handle = serve.run(engines(config, cluster, router), name=_NAME, route_prefix=None)
        except RuntimeError as error:  # from Serve, if replicas do not start
            raise UnsupportedModelError(f"the replicas do not start: {reason(error)}") from error
        try:
            facts: EngineInfo = handle.facts.remote().result()
            yield RemoteEngine(handle, facts), facts
        finally:
            serve.delete(_NAME)  # a joined cluster keeps running
    finally:
        ray.shutdown()


def _check_room(cluster: ClusterConfig) -> None:
    """ConfigError if Ray lacks CPUs or GPUs: it would wait for them without end."""
    has = ray.cluster_resources()
    wants = {
        "CPU": cluster.replicas * cluster.cpus_per_replica,
        "GPU": cluster.replicas * cluster.gpus_per_replica,
    }
    problems = [
        f"--replicas {cluster.replicas} need {wanted:g} {kind}s, and Ray has {has.get(kind, 0):g}"
        for kind, wanted in wants.items()
        if wanted > has.get(kind, 0)
    ]
    if problems:
        raise ConfigError(problems)
