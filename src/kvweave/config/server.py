"""Settings of the HTTP server and of the replicas behind it: address, keys, limits, logs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from ipaddress import ip_address

from kvweave.config.base import flag, flag_name, positive

_HOST = re.compile(r"\*|(\*\.)?[\w.-]+|[\da-f]*:[\da-f]*:[\da-f:]*")
"""Any name; a name, or all below it; an IPv6 address."""
_ORIGIN = re.compile(r"\*|[a-z][a-z\d+.-]*://[^/\s]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Address, keys, limits, explorer and logs of the HTTP server."""

    host: str = flag("127.0.0.1", "Address to listen on.")
    port: int = flag(8000, "Port to listen on.")
    api_key: str | None = flag(None, "Clients must send this key; KVWEAVE_API_KEY does the same.")
    admin_api_key: str | None = flag(
        None,
        "Operators must send this key, instead of the clients', for the explorer, metrics, "
        "settings, flushing and aborting; KVWEAVE_ADMIN_API_KEY does the same.",
    )
    allowed_hosts: str | None = flag(
        None,
        "Names, separated by commas, by which browsers may call a server without a key, beyond its "
        "own: llm.example.com, *.example.com, or * for any.",
    )
    allowed_origins: str | None = flag(
        None,
        "Other sites, separated by commas, whose pages may use this server: "
        "https://app.example.com, or * for all.",
    )
    max_body_bytes: int = flag(16 * 2**20, "Largest request body.")
    max_connections: int = flag(
        10_000, "Open connections; more are answered 503, except for /health."
    )
    keep_alive_seconds: float = flag(5.0, "Time that a connection may be idle between requests.")
    client_seconds: float = flag(
        60.0,
        "Time that a client may take to send the head of a request, to send its body, or to read "
        "a part of its answer.",
    )
    sampling_defaults: str = flag(
        "model",
        "What holds where a request names no temperature, top_p, top_k, min_p or "
        "repetition_penalty: the model's generation_config, or OpenAI's defaults.",
        choices=("model", "openai"),
    )
    max_stored_responses: int = flag(
        1024, "Answers of /v1/responses kept for previous_response_id; 0: none."
    )
    volatile_head: tuple[str, ...] = flag(
        (),
        "Lines of system texts that change with every call, by a regular expression that matches "
        "their beginning; requests with move_volatile_head have them moved behind the rest.",
    )
    drain_seconds: float = flag(
        30.0, "Time for running answers after the signal to stop; then they are aborted."
    )
    explorer: bool = flag(True, "Serve the page /explorer, and remember recent prompts for it.")
    explorer_hide_text: bool = flag(
        False, "Show no text there. Text is always hidden where others could read it without a key."
    )
    tool_call_parser: str = flag(
        "auto",
        "How the model writes tool calls, by family; auto: as its chat template does; none: calls "
        "stay in the text.",
        choices="tool-call-parsers",
    )
    reasoning_parser: str = flag(
        "auto",
        "How the model marks its reasoning; auto: as its chat template does; none: it stays in the "
        "text.",
        choices="reasoning-parsers",
    )
    describe_tools: bool = flag(
        True,
        "Where the chat template knows no tools, describe them in the system message; without it "
        "such requests are refused.",
    )
    log_requests: bool = flag(False, "Log every request when it ends (never its text).")
    log_level: str = flag(
        "info", "How much is logged.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = flag(
        "text", "Log lines as text, or as one JSON object a line.", choices=("text", "json")
    )

    @property
    def is_loopback(self) -> bool:
        """Whether it listens on this machine only."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    @property
    def open(self) -> bool:
        """Whether clients of other machines need no key."""
        return self.api_key is None and not self.is_loopback

    @property
    def hosts(self) -> tuple[str, ...]:
        """`allowed_hosts`, in lower case, IPv6 addresses without brackets."""
        return tuple(name.strip("[]") for name in _listed(self.allowed_hosts))

    @property
    def origins(self) -> tuple[str, ...]:
        """`allowed_origins`, in lower case and without a path, as browsers send them."""
        return tuple(origin.removesuffix("/") for origin in _listed(self.allowed_origins))

    @property
    def has_key(self) -> bool:
        """Whether the explorer's data needs a key."""
        return self.api_key is not None or self.admin_api_key is not None

    @property
    def hides_text(self) -> bool:
        """Whether the explorer shows no text: always where others could read it without a key."""
        reached_by_others = not self.is_loopback or self.allowed_hosts is not None
        return self.explorer_hide_text or (reached_by_others and not self.has_key)

    def problems(self) -> list[str]:
        found = positive(self, "max_body_bytes", "max_connections")
        found += positive(self, "keep_alive_seconds", "client_seconds")
        if not (math.isfinite(self.drain_seconds) and self.drain_seconds >= 0):
            found.append(f"--drain-seconds is a time of 0 or more, not {self.drain_seconds}")
        for pattern in self.volatile_head:
            try:
                re.compile(pattern)
            except re.error as wrong:
                found.append(f"--volatile-head {pattern!r} is no regular expression: {wrong}")
        if self.max_stored_responses < 0:
            found.append(
                f"--max-stored-responses must be 0 or more, not {self.max_stored_responses}"
            )
        found += [
            f"{flag_name(self, name)} must not be empty"
            for name in ("api_key", "admin_api_key")
            if getattr(self, name) == ""
        ]
        if self.api_key is not None and self.api_key == self.admin_api_key:
            found.append("--admin-api-key must differ from --api-key")
        found += [
            f"--allowed-hosts lists names such as llm.example.com or *.example.com, not {name!r}"
            for name in self.hosts
            if not _HOST.fullmatch(name)
        ]
        found += [
            f"--allowed-origins lists origins such as https://app.example.com, not {origin!r}"
            for origin in self.origins
            if not _ORIGIN.fullmatch(origin)
        ]
        if not 0 <= self.port <= 65535:
            found.append(f"--port is a number up to 65535, not {self.port}")
        return found


def _listed(text: str | None) -> list[str]:
    """The parts of a list separated by commas, in lower case; none of None."""
    return [] if text is None else [part.strip().lower() for part in text.split(",")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Number and resources of the engines; Ray Serve runs more than one as replicas."""

    replicas: int = flag(1, "Engines behind this server; above 1, Ray Serve runs them.")
    cpus_per_replica: float = flag(
        1.0, "CPUs that Ray keeps for each; threads of their arithmetic, too."
    )
    gpus_per_replica: float = flag(0.0, "GPUs that Ray keeps for each.")
    ray_address: str | None = flag(
        None, "Ray cluster to run them in (auto: the one of this machine); a new one without it."
    )

    def problems(self) -> list[str]:
        found = positive(self, "replicas", "cpus_per_replica")
        if not (math.isfinite(self.gpus_per_replica) and self.gpus_per_replica >= 0):
            found.append(f"--gpus-per-replica is 0 or more, not {self.gpus_per_replica}")
        return found
