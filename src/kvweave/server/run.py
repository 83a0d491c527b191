"""Runs a built application: binds the address, serves, and drains when told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from kvweave.config import ServerConfig
from kvweave.errors import ConfigError, EngineDeadError
from kvweave.server.connections import Connection, ConnectionLimiter
from kvweave.server.service import Service

_FLUSH_SECONDS = 5.0
"""For aborted answers to reach their clients, after the drain's deadline."""
_KERNEL_BUFFER = 2**17
"""Bytes of an answer that the kernel keeps for its reader; Linux doubles the figure."""
_POLL_SECONDS = 0.05
"""Between two checks whether a second signal came."""


def bind(config: ServerConfig) -> socket.socket:
    """A socket bound to the configured address; ConfigError if that is not possible.

    Done before anything slow, such as loading a model.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it; by default the kernel buffers megabytes for a reader that stalls.
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER)
    try:
        taken.bind((config.host, config.port))
    except OSError as failure:
        taken.close()
        raise ConfigError(
            [
                f"cannot listen on {config.host} port {config.port} "
                f"({failure.strerror or failure}); --host and --port name another place"
            ]
        ) from None
    return taken


def url_of(listening: socket.socket) -> str:
    """The URL under which clients on this machine reach the socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: FastAPI,
    config: ServerConfig,
    listening: socket.socket,
    *,
    on_ready: Callable[[str], None] = lambda url: None,
    leave_with_engine: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish what runs, within the drain's deadline.

    A second signal ends the drain at once, a third the process. With `leave_with_engine` it also
    ends, by EngineDeadError, when the engine has stopped for good, so that a supervisor can start
    another process.
    """
    server = DrainingServer(app, config, on_ready, leave_with_engine)
    server.run(sockets=[listening])
    if server.engine_died:
        raise EngineDeadError("the engine has stopped for good, and so has the server")


class DrainingServer(uvicorn.Server):
    """A uvicorn server that, on shutdown, lets running answers finish and then aborts the rest.

    Aborted answers still end properly; uvicorn alone would cut them off in the middle of a line.
    """

    def __init__(
        self,
        app: FastAPI,
        config: ServerConfig,
        on_ready: Callable[[str], None],
        leave_with_engine: bool = False,
    ) -> None:
        limiter = ConnectionLimiter(app, config.max_connections)
        connection = partial(Connection, limiter=limiter, client_seconds=config.client_seconds)
        super().__init__(
            uvicorn.Config(
                app,
                http=connection,  # type: ignore[arg-type]
                timeout_keep_alive=config.keep_alive_seconds,  # type: ignore[arg-type]
                log_config=None,
                access_log=config.log_level == "debug",
                timeout_graceful_shutdown=round(config.drain_seconds + _FLUSH_SECONDS),
                ws="none",
                server_header=False,
            )
        )
        self._service: Service = app.state.service
        self._drain_seconds = config.drain_seconds
        self._on_ready = on_ready
        self._leave_with_engine = leave_with_engine
        self._hurry = False
        self.engine_died = False
        """Whether the server stops because the engine has."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif not self._hurry:
            self._hurry = True  # polled by the drain
        else:
            self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets:
            self._on_ready(url_of(sockets[0]))

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; uvicorn calls this ten times a second."""
        if self._leave_with_engine and not self._service.engine.alive and not self.should_exit:
            self.engine_died = True
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        deadline = asyncio.create_task(self._end_drain())
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await deadline

    async def _end_drain(self) -> None:
        """Abort all live generations at the drain's deadline."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._drain_seconds
        while not self._hurry and clock() < deadline:
            await asyncio.sleep(min(_POLL_SECONDS, max(deadline - clock(), 0.0)))
        self._service.live.abort()
