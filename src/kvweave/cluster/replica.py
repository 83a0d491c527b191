"""One engine as a Ray Serve deployment, of which each replica runs one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import ray.util

from kvweave.config import EngineConfig
from kvweave.engine.types import EngineSnapshot, GenerateRequest, OutputDelta
from kvweave.errors import EngineDeadError
from kvweave.prefix.registry import exact_form
from kvweave.server.model_card import EngineInfo

_HANGS_AFTER = 120.0
"""Seconds without the end of a step after which the engine counts as hanging."""
_MOST_UNREAD = 10_000
"""Batches of events kept for a slow router, which requests a replay of missed ones."""


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
        self._metadata = {
            "model": loaded.identity,
            "page_size": config.cache.page_size,
            "stride": config.fuzzy.stride,
            "moves": exact_form(config.cache.prefix_cache_backend) is not None,
            **_addresses(engine),
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


def _addresses(engine: Any) -> dict[str, str]:
    publisher = engine.components.events
    return {"events": publisher.endpoint, "replay": publisher.replay_endpoint}
