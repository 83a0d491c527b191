"""Ray Serve's request router for engines: sends a prompt to the replica with the most overlap.

Runs in every process with a handle to the engines and follows each replica's cache events. Its
view may be out of date, which costs time and never correctness.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvweave.cluster.overlap import (
    Keying,
    Overlap,
    PromptKeys,
    ReplicaLoad,
    ReplicaView,
    Weights,
    ranked,
)
from kvweave.engine.types import GenerateRequest
from kvweave.events.follower import EventFollower

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
        keys = self._keys(request, self._followed[known[0].replica_id].keying)
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

    def _keys(self, request: GenerateRequest, keying: Keying) -> PromptKeys:
        return PromptKeys(np.array(request.prompt_ids, np.int32), request.cache_salt, keying)

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
