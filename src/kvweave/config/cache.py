"""Settings of the KV cache, its events and the scheduler.

The JSON of --kv-events-config has vLLM's and SGLang's keys.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from kvweave.config.base import WORDS, flag, kinds_of, positive, share
from kvweave.errors import ConfigError

FLAG = "--kv-events-config"
_SCHEMES = ("tcp://", "ipc://", "inproc://")
_BINDABLE = ("*", "::", "0.0.0.0")
_TOO_MANY = 2**31 - 1
"""ZeroMQ counts in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsConfig:
    """Addresses and limits of publishing. Sizes count batches; a batch holds one step's changes."""

    publisher: str = "zmq"
    """"zmq", or "null" for none."""
    enable_kv_cache_events: bool = True
    """vLLM's switch; False is `publisher` "null"."""
    endpoint: str = "tcp://*:5557"
    """Address of the PUB socket."""
    bind: bool | None = None
    """Bind or connect; None binds wildcard, ipc and inproc addresses, and connects to others."""
    replay_endpoint: str | None = None
    """Address of the ROUTER socket that sends past batches again; None: no replay."""
    buffer_steps: int = 10_000
    """Past batches kept for replay."""
    hwm: int = 100_000
    """Batches that may wait for one slow subscriber; it misses later ones."""
    max_queue_size: int = 100_000
    """Batches that may wait to be sent; later ones are dropped and counted."""
    topic: str = ""
    format: str = "map"
    """Form of an event: "map" in today's vLLM and SGLang, "array" in older ones."""

    @classmethod
    def wanted(cls, text: str | None) -> EventsConfig | None:
        """As `parse`; None if nothing is to be published."""
        config = None if text is None else cls.parse(text)
        if config is None or config.publisher == "null" or not config.enable_kv_cache_events:
            return None
        return config

    @classmethod
    def parse(cls, text: str) -> EventsConfig:
        """Read the flag's JSON; ConfigError names all problems."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError([f"{FLAG} takes JSON, and this is none: {error}"]) from None
        if not isinstance(given, dict):
            raise ConfigError(
                [f'{FLAG} takes a JSON object such as {{"endpoint": "tcp://*:5557"}}']
            )
        problems = _type_problems(given)
        known = {item.name for item in fields(cls)}
        problems += [
            f"{FLAG} has no key {name!r}; it has {', '.join(sorted(known))}"
            for name in given
            if name not in known
        ]
        if not problems:
            config = cls(**given)
            problems = config.problems()
        if problems:
            raise ConfigError(problems)
        return config

    def problems(self) -> list[str]:
        found = []
        for name, allowed in (("publisher", ("zmq", "null")), ("format", ("map", "array"))):
            if getattr(self, name) not in allowed:
                found.append(
                    f"{FLAG}: {name} is {' or '.join(allowed)}, not {getattr(self, name)!r}"
                )
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is not None and not value.startswith(_SCHEMES):
                found.append(
                    f"{FLAG}: {name} begins with one of {', '.join(_SCHEMES)}, unlike {value!r}"
                )
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if not 0 < getattr(self, name) < _TOO_MANY:
                found.append(
                    f"{FLAG}: {name} must be above 0 and below 2^31 - 1, not {getattr(self, name)}"
                )
        return found

    @property
    def binds(self) -> bool:
        """Whether the PUB socket binds its endpoint, rather than connecting to it."""
        if self.bind is not None:
            return self.bind
        scheme, _, address = self.endpoint.partition("://")
        host = address.rpartition(":")[0].strip("[]")
        return scheme != "tcp" or host in _BINDABLE

    def described(self, block_size: int) -> dict[str, Any] | None:
        """The keys of /server_info that SGLang's routers read; None without a TCP address."""
        found = _tcp(self.endpoint)
        if found is None:
            return None
        said = {
            "publisher": self.publisher,
            "endpoint_host": found[0],
            "endpoint_port_base": found[1],
            "topic": self.topic,
            "block_size": block_size,
            "dp_size": 1,
        }
        if (again := _tcp(self.replay_endpoint or "")) is not None:
            said["replay_endpoint_port_base"] = again[1]
        return said


def _tcp(endpoint: str) -> tuple[str, int] | None:
    """Host and port of a TCP address; None if one of them is open."""
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        return None
    return host, int(port)


def _type_problems(given: dict[str, Any]) -> list[str]:
    kinds = kinds_of(EventsConfig)
    found = []
    for item in fields(EventsConfig):
        value, kind = given.get(item.name, item.default), kinds[item.name]
        if type(value) is not kind and value is not item.default:
            words = WORDS[kind] + (" or null" if item.default is None else "")
            found.append(f"{FLAG}: {item.name} is {words}, not {json.dumps(value)}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The prefix cache backend, the pool's size and the order of eviction."""

    prefix_cache_backend: str = flag("hash", "Which KV is reused.", choices="prefix-cache-backends")
    page_size: int = flag(16, "Slots per page, the unit in which KV is owned and shared.")
    max_total_tokens: int | None = flag(None, "Slots in the pool; from free memory without it.")
    mem_fraction_static: float = flag(
        0.5, "Share of free memory for the KV pool, without --max-total-tokens."
    )
    radix_eviction_policy: str = flag(
        "lru", "Which cached pages are evicted first.", choices=("lru", "lfu", "slru", "priority")
    )
    cache_retention_share: float = flag(
        0.25,
        "Most of the pool that KV of sessions, and of requests with prompt_cache_retention, keeps "
        "from eviction by others; 0: none.",
    )
    cold_group_wait: bool = flag(
        True,
        "Wait for a running request that computes the same prefix, where the backend allows.",
    )
    kv_store: str | None = flag(
        None, "Folder that keeps KV on disk, for after eviction and restarts; none without it."
    )
    kv_store_gb: float = flag(10.0, "Most gigabytes in that folder; the oldest KV leaves it first.")
    kv_events_config: str | None = flag(
        None,
        "Publish which KV is cached: JSON as vLLM and SGLang take it, "
        """such as '{"endpoint": "tcp://*:5557"}'.""",
    )

    def problems(self) -> list[str]:
        found = positive(self, "page_size", "max_total_tokens", "kv_store_gb")
        found += share(self, "cache_retention_share")
        if not 0 < self.mem_fraction_static <= 1:
            found.append(
                f"--mem-fraction-static is a share above 0, up to 1, not {self.mem_fraction_static}"
            )
        if self.max_total_tokens is not None and 0 < self.max_total_tokens < self.page_size:
            found.append(
                f"--max-total-tokens {self.max_total_tokens} holds no page of "
                f"--page-size {self.page_size}"
            )
        return found + _events_problems(self.kv_events_config)


def _events_problems(text: str | None) -> list[str]:
    try:
        if text is not None:
            EventsConfig.parse(text)
    except ConfigError as error:
        return list(error.problems)
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of running and waiting requests, and their order."""

    max_running_requests: int = flag(64, "Requests that run together.")
    max_queued_requests: int = flag(1024, "Requests that may wait; more are answered 429.")
    chunked_prefill_size: int = flag(
        2048, "Tokens computed in one step, prompts and outputs together."
    )
    schedule_policy: str = flag(
        "fcfs",
        "Order of waiting requests: first come, or longest cached prefix.",
        choices=("fcfs", "lpm"),
    )
    random_seed: int | None = flag(None, "Seed for requests that bring none.")

    def problems(self) -> list[str]:
        return positive(self, "max_running_requests", "max_queued_requests", "chunked_prefill_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Whether decoding proposes tokens from text that is there, and how many at most."""

    PREFIX: ClassVar[str] = "speculative_"

    algorithm: str = flag(
        "none",
        "Propose the next tokens from the prompt, the answer and cached text, and verify them in "
        "one forward pass: NGRAM, or none.",
        choices=("none", "NGRAM"),
    )
    num_draft_tokens: int = flag(12, "Most tokens that are proposed for one answer in one step.")
    ngram_min_match_window_size: int = flag(
        2, "Tokens at the end of an answer that must stand elsewhere too before any is proposed."
    )

    def problems(self) -> list[str]:
        return positive(self, "num_draft_tokens", "ngram_min_match_window_size")
