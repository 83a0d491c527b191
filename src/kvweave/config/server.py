"""Settings of the HTTP server: address, keys, limits, explorer and logs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvweave.config.base import flag, flag_name, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP surface."""

    host: str = flag("127.0.0.1", "Address to listen on.")
    port: int = flag(8000, "Port to listen on.")
    api_key: str | None = flag(None, "Clients must send this key; KVWEAVE_API_KEY does the same.")
    admin_api_key: str | None = flag(
        None,
        "What operators ask (the explorer, metrics, settings, flushing, aborting) takes this key "
        "and not the clients'; KVWEAVE_ADMIN_API_KEY does the same.",
    )
    max_body_bytes: int = flag(16 * 2**20, "Largest request body.")
    max_connections: int = flag(
        10_000, "Open connections; more are answered 503, except for /health."
    )
    keep_alive_seconds: float = flag(5.0, "Time that a connection may be idle between requests.")
    client_seconds: float = flag(
        60.0,
        "Time that a client may take to send the head of a request, to send its body, or to take "
        "something of its answer.",
    )
    drain_seconds: float = flag(
        30.0, "Time for running answers when the server is told to stop; then they are cut short."
    )
    explorer: bool = flag(True, "Serve the page /explorer, and remember recent prompts for it.")
    explorer_hide_text: bool = flag(
        False, "Show no text there; none is shown either where anyone may come without a key."
    )
    log_requests: bool = flag(False, "Log every request when it ends (never its text).")
    log_level: str = flag(
        "info", "How much is logged.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = flag(
        "text", "Log lines for people, or JSON objects, one a line.", choices=("text", "json")
    )

    @property
    def open(self) -> bool:
        """Whoever reaches this machine may use the server."""
        return self.api_key is None and self.host not in ("127.0.0.1", "localhost", "::1")

    @property
    def has_key(self) -> bool:
        """Nobody sees the explorer's data without one."""
        return self.api_key is not None or self.admin_api_key is not None

    @property
    def hides_text(self) -> bool:
        """The explorer shows no text: by order, or since anyone could read everyone's prompts."""
        return self.explorer_hide_text or (self.open and self.admin_api_key is None)

    def problems(self) -> list[str]:
        found = positive(self, "max_body_bytes", "max_connections")
        found += positive(self, "keep_alive_seconds", "client_seconds")
        if not (math.isfinite(self.drain_seconds) and self.drain_seconds >= 0):
            found.append(f"--drain-seconds is a time of 0 or more, not {self.drain_seconds}")
        found += [
            f"{flag_name(self, name)} must not be empty"
            for name in ("api_key", "admin_api_key")
            if getattr(self, name) == ""
        ]
        if self.api_key is not None and self.api_key == self.admin_api_key:
            found.append("--admin-api-key must be another one than --api-key, or there is no use")
        if not 0 <= self.port <= 65535:
            found.append(f"--port is a number up to 65535, not {self.port}")
        return found
