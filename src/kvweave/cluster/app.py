"""Ray Serve applications: engines alone, engines behind the HTTP server, and the router to them.

`serve run kvweave.cluster.app:app replicas=2 prefix_cache_backend=fuzzy_match` runs the second one;
its arguments are the flags of `kvweave serve`, with underscores.

The router sends a prompt to the replica with the most overlap. It runs in every process with a
handle to the engines and follows each replica's cache events. Its view may be out of date, which
costs time and never correctness.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.cluster.overlap import (
    Keying,
    Overlap,
    PromptKeys,
    ReplicaLoad,
    ReplicaView,
    Weights,
    ranked,
)
from kvweave.cluster.replica import EngineReplica, RemoteEngine
from kvweave.config import ClusterConfig, EngineConfig, ServerConfig, validate
from kvweave.config.base import kinds_of, make, read
from kvweave.engine.types import GenerateRequest
from kvweave.errors import ConfigError, UnsupportedModelError, reason
from kvweave.events.follower import EventFollower
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
        or RequestRouterConfig(request_router_class="kvweave.cluster.app:OverlapRouter"),
        health_check_period_s=5.0,
    )
    threads = max(1, int(cluster.cpus_per_replica)) if config.model.device != "cuda" else None
    return deployment.bind(config, threads)


_KEYS = ("api_key", "admin_api_key")
_SET_IN_RAY = (
    "host",
    "port",
    "max_connections",
    "keep_alive_seconds",
    "drain_seconds",
    "log_level",
    "log_format",
    "ray_address",
)
"""Settings that have no effect behind Serve's own proxies."""


class Ingress:
    """The HTTP server of `kvweave serve`, with engines in other processes."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, handle: Any, server: ServerConfig, cluster: ClusterConfig
    ) -> None:
        from kvweave.explorer.routes import build_app

        facts = await handle.facts.remote()
        self._engine = RemoteEngine(handle, facts)
        await self._engine.start()
        self._app = build_app(
            self._engine, facts.card, server, facts.config, facts.self_check, cluster
        )

    async def __call__(self, request: Request) -> Response:
        return _AsgiResponse(self._app)


class _AsgiResponse(Response):
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
        f"{name} is not set here, but in Ray's settings"
        for name in arguments
        if name in _SET_IN_RAY
    ]
    ours = [(name, value) for name, value in arguments.items() if name not in _SET_IN_RAY]
    groups = (EngineConfig, ClusterConfig, ServerConfig)
    values = read(ours, kinds_of(*groups), problems)
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


_MOST_OUTPUT = 256
"""Most output tokens that count as load; few answers use all of max_tokens."""
_UNSENT_SECONDS = 60.0
"""After this time a request that never reached its replica is forgotten."""


@dataclass(slots=True)
class _Booking:
    """A request that a replica was chosen for."""

    replica: ReplicaID
    keys: PromptKeys
    cost: int
    sent: bool = False
    time: float = field(default_factory=time.monotonic)


class _Followed:
    """This router's view of one replica."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.keying = Keying(metadata["model"], metadata["page_size"], metadata["stride"])
        self._moves: bool = metadata["moves"]
        self.view = ReplicaView(self.keying)
        self.load = 0
        self._follower = EventFollower(metadata["events"], metadata["replay"])

    def load_for(self, keys: PromptKeys) -> ReplicaLoad:
        self.view.apply(self._follower.drain())
        overlap = self.view.overlap(keys)
        if not self._moves:
            overlap = Overlap(overlap.exact, 0)
        return ReplicaLoad(overlap, self.load, self.view.kept)

    def book(self, booking: _Booking) -> None:
        self.view.expect(booking.keys)
        self.load += booking.cost

    def free(self, booking: _Booking) -> None:
        self.view.unexpect(booking.keys)
        self.load -= booking.cost

    def close(self) -> None:
        self._follower.close()


class OverlapRouter(RequestRouter):  # type: ignore[misc]  # untyped where Ray is not installed
    """For deployments of EngineReplica whose streaming calls take a GenerateRequest."""

    def initialize_state(self, **weights: float) -> None:
        """`weights`: fields of `overlap.Weights`."""
        self._weights = Weights(**weights)
        self._followed: dict[ReplicaID, _Followed] = {}
        self._bookings: dict[str, _Booking] = {}
        """Bookings by Serve's internal request id."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        for replica in replicas:
            if replica.replica_id not in self._followed and "events" in replica.replica_metadata:
                self._followed[replica.replica_id] = _Followed(replica.replica_metadata)
        for gone in self._followed.keys() - {replica.replica_id for replica in replicas}:
            self._forget(gone)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All candidates, one per rank, best first; in one rank if there is nothing to rank."""
        request = _prompt_of(pending_request)
        known = [each for each in candidate_replicas if each.replica_id in self._followed]
        if request is None or pending_request is None or not known:
            return [candidate_replicas]
        self._forget_unsent()
        keying = self._followed[known[0].replica_id].keying
        keys = PromptKeys(np.array(request.prompt_ids, np.int32), request.cache_salt, keying)
        loads = {each.replica_id: self._followed[each.replica_id].load_for(keys) for each in known}
        order = ranked(loads, keys.length, self._weights)
        best = loads[order[0]].overlap
        cost = keys.length - best.exact - int(self._weights.moved * best.moved)
        most = request.sampling.max_tokens
        cost += _MOST_OUTPUT if most is None else min(most, _MOST_OUTPUT)
        self._book(pending_request, _Booking(order[0], keys, cost))
        by_id = {each.replica_id: each for each in candidate_replicas}
        unknown = [each for each in candidate_replicas if each.replica_id not in loads]
        return [*([by_id[each]] for each in order), *([unknown] if unknown else [])]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """The replica accepted it; this may be another than the best, if that one was full."""
        booking = self._bookings.get(pending_request.metadata.internal_request_id)
        if booking is None:
            return
        booking.sent = True
        if booking.replica != replica_id:
            self._release(booking)
            booking.replica = replica_id
            if replica_id in self._followed:
                self._followed[replica_id].book(booking)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Remove its load. Called for every call of a replica, broadcasts too."""
        booking = self._bookings.get(internal_request_id)
        if booking is not None and booking.replica == replica_id:  # otherwise it was rerouted
            del self._bookings[internal_request_id]
            self._release(booking)

    def _book(self, pending: PendingRequest, booking: _Booking) -> None:
        name = pending.metadata.internal_request_id
        if (before := self._bookings.pop(name, None)) is not None:  # a retry
            self._release(before)
        self._bookings[name] = booking
        self._followed[booking.replica].book(booking)

    def _forget_unsent(self) -> None:
        """Drop bookings of requests that never reached a replica, and so never complete there."""
        latest = time.monotonic() - _UNSENT_SECONDS
        for name, booking in list(self._bookings.items()):  # the oldest first
            if booking.time > latest:
                break
            if not booking.sent:
                del self._bookings[name]
                self._release(booking)

    def _release(self, booking: _Booking) -> None:
        if booking.replica in self._followed:
            self._followed[booking.replica].free(booking)

    def _forget(self, replica_id: ReplicaID) -> None:
        if (followed := self._followed.pop(replica_id, None)) is not None:
            followed.close()


def _prompt_of(pending: PendingRequest | None) -> GenerateRequest | None:
    for argument in pending.args if pending is not None else ():
        if isinstance(argument, GenerateRequest):
            return argument
    return None
