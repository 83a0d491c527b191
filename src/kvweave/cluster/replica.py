"""Engines as replicas of a Ray Serve deployment, and the interface that a server sees of them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import ray.util
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from kvweave.config import EngineConfig
from kvweave.engine.types import EngineSnapshot, GenerateRequest, OutputDelta
from kvweave.errors import EngineDeadError, RequestError
from kvweave.prefix.base import exact_form
from kvweave.server.model_card import EngineInfo

if TYPE_CHECKING:
    from kvweave.engine.engine import Engine

logger = logging.getLogger("kvweave.cluster")
T = TypeVar("T")

_HANGS_AFTER = 120.0
"""Seconds without the end of a step after which the engine counts as hanging."""
_MOST_UNREAD = 10_000
"""Batches of events kept for a slow router, which requests a replay of missed ones."""
_REFRESH_SECONDS = 1.0
_BROADCAST_SECONDS = 10.0
_TRIES = 3
"""Attempts for a request whose replica dies before its first delta."""


class EngineReplica:
    """Loads the model, runs the engine, and publishes its cache's events for routers.

    Methods are called through a deployment handle; `abort` and `flush_cache` are broadcast.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: EngineConfig, threads: int | None = None
    ) -> None:
        """`threads`: CPU threads of this replica's arithmetic, where `config` says nothing."""
        # Imported here: Ray unpickles this class also in processes without a model.
        import torch

        from kvweave.engine.async_engine import AsyncEngine
        from kvweave.engine.engine import Engine
        from kvweave.engine.selfcheck.gate import guarded
        from kvweave.models import load_model
        from kvweave.server.model_card import engine_info

        threads = config.model.threads or threads
        if threads is not None:
            torch.set_num_threads(threads)
            config = replace(config, model=replace(config.model, threads=threads))
        loaded = await asyncio.to_thread(load_model, config.model)
        config, check = await asyncio.to_thread(guarded, config, loaded)
        self._facts = engine_info(loaded, config, check)
        engine = Engine(_publishing(config, ray.util.get_node_ip_address()), loaded)
        events: Any = engine.components.events
        self._metadata = {
            "model": loaded.identity,
            "page_size": config.cache.page_size,
            "stride": config.fuzzy.stride,
            "moves": exact_form(config.cache.prefix_cache_backend) is not None,
            "events": events.endpoint,
            "replay": events.replay_endpoint,
        }
        self._engine = AsyncEngine(engine)
        self._answering = 0
        self._asked: tuple[float, asyncio.Task[None]] | None = None
        await self._engine.start()

    def record_replica_metadata(self) -> dict[str, Any]:
        """For Ray Serve, which passes it to every router: how to follow this replica's cache."""
        return self._metadata

    async def check_health(self) -> None:
        """Ray Serve replaces a replica that raises here, by default three times.

        A hanging step is detected by a task between two steps. It is queued only while requests
        run: when idle, the engine heals, and the task would interrupt that.
        """
        if not self._engine.alive:
            raise EngineDeadError("the engine has stopped")
        if self._asked is not None and not self._asked[1].done():
            seconds = time.monotonic() - self._asked[0]
            if seconds > _HANGS_AFTER:
                raise EngineDeadError(f"the engine hangs: no step has ended for {seconds:.0f} s")
        elif self._answering:
            between_steps = asyncio.ensure_future(
                self._engine.run_on_engine_thread(lambda engine: None)
            )
            self._asked = time.monotonic(), between_steps

    async def facts(self) -> EngineInfo:
        """Equal in all replicas."""
        return self._facts

    async def generate(self, request: GenerateRequest) -> AsyncIterator[OutputDelta]:
        """Deltas of all answers; the request is aborted if the caller disconnects."""
        stream = self._engine.generate(request)
        self._answering += 1
        try:
            async for delta in stream:
                yield delta
        finally:
            self._answering -= 1
            await stream.aclose()

    async def abort(self, rid: str) -> None:
        """End a request with "abort", if it runs here."""
        self._engine.abort(rid)

    async def flush_cache(self, timeout: float) -> None:
        """RequestError if requests still run after `timeout` seconds."""
        await self._engine.flush_cache(timeout)

    async def close_session(self, session: str, cache_salt: str | None) -> int:
        """Forget what a session computed behind moved text; returns how many tokens."""
        return await self._engine.close_session(session, cache_salt)

    async def snapshot(self) -> EngineSnapshot:
        """Gauges and counters as of the last step."""
        return self._engine.snapshot()


def _publishing(config: EngineConfig, address: str) -> EngineConfig:
    """`config` with events on ports that the system chooses."""
    anywhere = f"tcp://{address}:0"
    events = {
        "endpoint": anywhere,
        "bind": True,
        "replay_endpoint": anywhere,
        "hwm": _MOST_UNREAD,
    }
    return replace(config, cache=replace(config.cache, kv_events_config=json.dumps(events)))


class RemoteEngine:
    """A `server.streaming.ServingEngine` over a handle to EngineReplica deployments."""

    def __init__(self, handle: DeploymentHandle, facts: EngineInfo) -> None:
        self.tokenizer = facts.tokenizer
        self.alive = True
        """Whether a replica answered the last query."""
        self._handle = handle
        self._snapshot = EngineSnapshot()
        self._refreshing: asyncio.Task[None] | None = None
        self._live: dict[str, Any] = {}
        """Ray's streams of running requests, by rid."""
        self._aborting: set[asyncio.Future[Any]] = set()
        """References that keep running tasks from garbage collection."""

    async def start(self) -> None:
        await self._refresh()
        self._refreshing = asyncio.create_task(self._keep_refreshing())

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """End this server's requests; the replicas keep running."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle(), drain_seconds)
        for rid in list(self._live):
            self.abort(rid)
        if self._refreshing is not None:
            self._refreshing.cancel()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[OutputDelta]:
        """As AsyncEngine.generate, except that refusals come with the first delta.

        If a replica dies before the first delta, another one takes the request.
        """
        for tries_left in reversed(range(_TRIES)):
            begun = False
            try:
                async for delta in self._ask(request):
                    begun = True
                    yield delta
                return
            except RayActorError:
                if begun or not tries_left:
                    raise RequestError(
                        "the replica that worked on this answer died; ask again", status=503
                    ) from None
                logger.warning("rid=%s lost its replica and goes to another one", request.rid)

    def abort(self, rid: str) -> None:
        """End a request; its answers finish with "abort". Unknown ids are ignored."""
        if rid in self._live:
            task = asyncio.ensure_future(self._broadcast("abort", rid))
            self._aborting.add(task)
            task.add_done_callback(self._aborted)

    async def flush_cache(self, timeout: float = 0.0) -> None:
        """Clear all caches; RequestError from the first replica that cannot within `timeout`."""
        await self._broadcast("flush_cache", timeout, patience=timeout)

    async def close_session(self, session: str, cache_salt: str | None) -> int:
        """All replicas forget the session; returns how many tokens."""
        return sum(await self._broadcast("close_session", session, cache_salt))

    def snapshot(self) -> EngineSnapshot:
        """The sum over all replicas, as of a second ago."""
        return self._snapshot

    async def run_on_engine_thread(self, at: Callable[[Engine], T]) -> T:
        """Not available: there is no single engine to inspect."""
        raise RequestError(
            "the explorer looks into one engine, and several stand behind this server", status=501
        )

    async def _ask(self, request: GenerateRequest) -> AsyncIterator[OutputDelta]:
        if request.rid in self._live:  # replicas check their own rids only
            raise RequestError(f"a request with rid {request.rid!r} is running", param="rid")
        stream = self._handle.options(stream=True).generate.remote(request)
        self._live[request.rid] = stream
        try:
            async for delta in stream:
                yield delta
        except RayTaskError as failure:  # the engine's own exception
            raise failure.cause from None
        except DeploymentUnavailableError:
            raise RequestError("no replica is running; try again later", status=503) from None
        finally:
            del self._live[request.rid]
            stream.cancel()

    async def _broadcast(self, method: str, *arguments: Any, patience: float = 0.0) -> list[Any]:
        try:
            calls = self._handle.broadcast(method, *arguments)
            answers: list[Any] = await calls.results_async(timeout_s=_BROADCAST_SECONDS + patience)
            return answers
        except RayTaskError as failure:
            raise failure.cause from None
        except (TimeoutError, RayActorError, DeploymentUnavailableError):
            raise RequestError("a replica does not answer; try again later", status=503) from None

    def _aborted(self, task: asyncio.Future[Any]) -> None:
        self._aborting.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("an abort did not reach every replica: %s", task.exception())

    async def _keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            try:
                await self._refresh()
            except Exception:  # keep refreshing: the next try may succeed
                self.alive = False
                logger.warning("the replicas did not report their state", exc_info=True)

    async def snapshots(self) -> list[EngineSnapshot]:
        """Snapshots of all running replicas, unordered; TimeoutError if one hangs."""
        try:
            answers = await self._handle.broadcast("snapshot").results_async(
                timeout_s=_BROADCAST_SECONDS, return_exceptions=True
            )
        except DeploymentUnavailableError:  # all have died; Ray starts others
            return []
        return [each for each in answers if isinstance(each, EngineSnapshot)]

    async def _refresh(self) -> None:
        try:
            snapshots = await self.snapshots()
        except TimeoutError:  # one hangs; the figures of the last refresh stay
            self.alive = await self._any_answers()
            return
        self.alive = bool(snapshots)
        self._snapshot = total(snapshots)

    async def _any_answers(self) -> bool:
        """Whether the replica that Ray would choose for a request answers."""
        try:
            await asyncio.wait_for(self._handle.snapshot.remote(), _BROADCAST_SECONDS)
        except Exception:
            return False
        return True

    async def _idle(self) -> None:
        while self._live:
            await asyncio.sleep(0.02)


def total(snapshots: Iterable[EngineSnapshot]) -> EngineSnapshot:
    """Sums of all gauges and counters; mappings are added key by key."""
    sums: dict[str, Any] = {}
    for snapshot in snapshots:
        for name in (item.name for item in fields(EngineSnapshot)):
            figure = getattr(snapshot, name)
            if isinstance(figure, Mapping):
                by_name = sums.setdefault(name, {})
                for key, value in figure.items():
                    by_name[key] = by_name.get(key, 0) + value
            else:
                sums[name] = sums.get(name, 0) + figure
    return EngineSnapshot(**sums)
