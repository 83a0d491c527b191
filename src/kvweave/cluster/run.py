"""Engines in Ray for as long as a server in this process needs them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from kvweave.cluster.app import engines
from kvweave.cluster.remote import RemoteEngine
from kvweave.config import ClusterConfig, EngineConfig
from kvweave.errors import ConfigError, UnsupportedModelError, reason
from kvweave.server.model_card import Facts

_NAME = "kvweave"
"""Of the Serve application."""


@contextmanager
def running_engines(
    config: EngineConfig, cluster: ClusterConfig, router: RequestRouterConfig | None = None
) -> Iterator[tuple[RemoteEngine, Facts]]:
    """Replicas that are up, within the block.

    Ray is started for them, on this machine's loopback, unless there is a cluster to join; what was
    started is stopped. `router`: another than ours, for comparisons. Raises
    ConfigError, UnsupportedModelError.
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
        except RuntimeError as error:  # Serve's word for replicas that do not come up
            raise UnsupportedModelError(f"the replicas do not start: {reason(error)}") from error
        try:
            facts: Facts = handle.facts.remote().result()
            yield RemoteEngine(handle, facts), facts
        finally:
            serve.delete(_NAME)  # the cluster may go on without us
    finally:
        ray.shutdown()


def _check_room(cluster: ClusterConfig) -> None:
    """Ray would wait for ever for what it does not have."""
    has = ray.cluster_resources()
    wants = {
        "CPU": cluster.replicas * cluster.cpus_per_replica,
        "GPU": cluster.replicas * cluster.gpus_per_replica,
    }
    problems = [
        f"--replicas {cluster.replicas} want {wanted:g} {kind}s, and Ray has {has.get(kind, 0):g}"
        for kind, wanted in wants.items()
        if wanted > has.get(kind, 0)
    ]
    if problems:
        raise ConfigError(problems)
