"""Every setting, once. The command line is derived from these dataclasses.

A field's `metadata` carries what its flag says: `help`, and `choices` where only some values work.
`validate()` collects every problem, so that one failed start names all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from kvweave.config.checks import flag_name, positive, share
from kvweave.config.events import EventsConfig
from kvweave.errors import ConfigError
from kvweave.plugins import choices_of


def _flag(default: Any, help: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What is served, and in which numbers."""

    model: str | None = _flag(
        None,
        "Folder, Hugging Face name or GGUF file; without it, the packaged SmolLM2-135M-Instruct.",
    )
    tokenizer: str | None = _flag(
        None, "Folder or name of the tokenizer, when it is not the model's."
    )
    revision: str | None = _flag(None, "Hub revision of the model.")
    served_model_name: str | None = _flag(
        None, "Name that clients use; the model's own without it."
    )
    dtype: str = _flag(
        "auto", "Number type of weights and KV.", choices=("auto", "float32", "bfloat16")
    )
    device: str = _flag("auto", "Torch device: auto, cpu, cuda, cuda:1.")
    context_length: int | None = _flag(
        None, "Longest prompt plus output; the model's own without it."
    )
    attention_backend: str = _flag(
        "auto", "Who computes attention.", choices=("auto", "cpu", "sdpa", "flashinfer")
    )
    chat_template: str | None = _flag(
        None, "File with a Jinja chat template, instead of the model's."
    )

    def problems(self) -> list[str]:
        return positive(self, "context_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """What KV is kept, how much, and what goes first."""

    prefix_cache_backend: str = _flag(
        "hash", "Which KV is reused.", choices="prefix-cache-backends"
    )
    page_size: int = _flag(16, "Slots per page, the unit in which KV is owned and shared.")
    max_total_tokens: int | None = _flag(None, "Slots in the pool; from free memory without it.")
    mem_fraction_static: float = _flag(
        0.5, "Share of free memory for the KV pool, without --max-total-tokens."
    )
    radix_eviction_policy: str = _flag(
        "lru", "Which cached pages go first.", choices=("lru", "lfu", "slru", "priority")
    )
    cold_group_wait: bool = _flag(
        True,
        "Wait for a running request that computes the same prefix, where the backend allows.",
    )
    kv_events_config: str | None = _flag(
        None,
        "Publish which KV is cached: JSON as vLLM and SGLang take it, "
        """such as '{"endpoint": "tcp://*:5557"}'.""",
    )

    def problems(self) -> list[str]:
        found = positive(self, "page_size", "max_total_tokens")
        if not 0 < self.mem_fraction_static <= 1:
            found.append(
                f"--mem-fraction-static is a share above 0, up to 1, not {self.mem_fraction_static}"
            )
        return found + _unreadable_events(self.kv_events_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzyConfig:
    """Reuse beyond the prefix; read by the backends that offer it."""

    fuzzy_provider: str = _flag("spans", "Who nominates donors.", choices="fuzzy-providers")
    fuzzy_min_span: int = _flag(32, "Shortest run of tokens worth moving.")
    fuzzy_min_suffix: int = _flag(8, "Tokens at the end of every prompt that are always computed.")
    fuzzy_min_reuse_ratio: float = _flag(
        0.1, "Least share of a prompt that moved spans must serve, else none."
    )
    fuzzy_sink_tokens: int = _flag(
        4, "First tokens of prompts that are never moved, neither from nor to."
    )
    fuzzy_stride: int = _flag(16, "Tokens between two doors of the span index.")
    fuzzy_max_share: float = _flag(
        1.0, "Most of a prompt that moved spans may serve; 0 demands exactness."
    )
    fuzzy_refresh: float = _flag(
        0.0, "Share of what moved spans serve that is computed again: 0 none, 1 all."
    )
    fuzzy_refresh_strategy: str = _flag(
        "mix", "Who chooses what is computed again.", choices="fuzzy-refresh-strategies"
    )
    fuzzy_time_budget_ms: float = _flag(
        50.0, "A provider that takes longer loses this request's reuse."
    )
    fuzzy_self_check: str = _flag(
        "on",
        "Measure once per model whether moved text changes its answers; if it does, reuse exactly "
        "(on) or do not start (require).",
        choices=("on", "off", "require"),
    )
    fuzzy_self_check_max_kl: float = _flag(
        0.1, "Most that the self-check's next tokens may differ from cold ones: mean KL, in nats."
    )
    fuzzy_self_check_max_decoys: int = _flag(
        0, "Most answers of the self-check that may give the fact of a nearly equal text."
    )
    fuzzy_semantic_embedder: str = _flag(
        "minilm",
        "What the semantic provider compares meanings with; both are packages of their own.",
        choices="embedders",
    )
    fuzzy_semantic_threshold: float = _flag(
        0.8, "Least likeness, up to 1, of other words that say the same."
    )
    fuzzy_semantic_min_span: int = _flag(
        4, "Shortest run of tokens worth serving in other words; fewer are computed along."
    )
    fuzzy_semantic_max_share: float = _flag(
        0.25, "Most of a prompt that may be served in other words; 0: none of it."
    )
    fuzzy_semantic_budget_ms: float = _flag(
        25.0,
        "Time that a prompt may wait for meanings to be compared, where that may help it; as much "
        "again for a verifier.",
    )
    fuzzy_verifier: str = _flag(
        "none", "Who else may object to what is served in other words.", choices="verifiers"
    )
    fuzzy_verifier_model: str | None = _flag(
        None, "Folder or Hugging Face name of the model that the verifier nli asks."
    )
    fuzzy_semantic_index_tokens: int = _flag(
        131_072, "Tokens whose meaning is remembered; the oldest make room."
    )

    fuzzy_heal: bool = _flag(
        False, "When idle, compute exactly what was served approximately, for whoever asks again."
    )
    fuzzy_heal_queue: int = _flag(256, "Prompts that may wait for that; the oldest give way.")

    def problems(self) -> list[str]:
        found = positive(
            self,
            "fuzzy_min_span",
            "fuzzy_min_suffix",
            "fuzzy_stride",
            "fuzzy_time_budget_ms",
            "fuzzy_heal_queue",
        )
        found += positive(self, "fuzzy_semantic_budget_ms", "fuzzy_semantic_index_tokens")
        found += positive(self, "fuzzy_semantic_min_span")
        found += share(self, "fuzzy_min_reuse_ratio", "fuzzy_max_share", "fuzzy_refresh")
        found += share(self, "fuzzy_semantic_threshold", "fuzzy_semantic_max_share")
        for name in ("fuzzy_self_check_max_kl", "fuzzy_self_check_max_decoys"):
            if not getattr(self, name) >= 0:
                found.append(f"{flag_name(name)} must be 0 or more, not {getattr(self, name)}")
        if self.fuzzy_sink_tokens < 0:
            found.append(f"--fuzzy-sink-tokens counts tokens, so not {self.fuzzy_sink_tokens}")
        if self.fuzzy_min_span < 2 * self.fuzzy_stride - 1:
            found.append(
                f"--fuzzy-min-span {self.fuzzy_min_span} is below 2 x --fuzzy-stride - 1 = "
                f"{2 * self.fuzzy_stride - 1}, the shortest run that is sure to be found: "
                "raise the one or lower the other"
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs when."""

    max_running_requests: int = _flag(64, "Requests that run together.")
    max_queued_requests: int = _flag(1024, "Requests that may wait; more are answered 429.")
    chunked_prefill_size: int = _flag(
        2048, "Tokens computed in one step, prompts and outputs together."
    )
    schedule_policy: str = _flag(
        "fcfs",
        "Order of waiting requests: first come, or longest cached prefix.",
        choices=("fcfs", "lpm"),
    )
    random_seed: int | None = _flag(None, "Seed for requests that bring none.")

    def problems(self) -> list[str]:
        return positive(self, "max_running_requests", "max_queued_requests", "chunked_prefill_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP surface."""

    host: str = _flag("127.0.0.1", "Address to listen on.")
    port: int = _flag(8000, "Port to listen on.")
    api_key: str | None = _flag(None, "Clients must send this key; KVWEAVE_API_KEY does the same.")
    admin_api_key: str | None = _flag(
        None,
        "What operators ask (the explorer, metrics, settings, flushing, aborting) takes this key "
        "and not the clients'; KVWEAVE_ADMIN_API_KEY does the same.",
    )
    max_body_bytes: int = _flag(16 * 2**20, "Largest request body.")
    max_connections: int = _flag(
        10_000, "Open connections; more are answered 503, except for /health."
    )
    keep_alive_seconds: float = _flag(5.0, "Time that a connection may be idle between requests.")
    client_seconds: float = _flag(
        60.0,
        "Time that a client may take to send the head of a request, to send its body, or to take "
        "something of its answer.",
    )
    drain_seconds: float = _flag(
        30.0, "Time for running answers when the server is told to stop; then they are cut short."
    )
    explorer: bool = _flag(True, "Serve the page /explorer, and remember recent prompts for it.")
    explorer_hide_text: bool = _flag(
        False, "Show no text there; none is shown either where anyone may come without a key."
    )
    log_requests: bool = _flag(False, "Log every request when it ends (never its text).")
    log_level: str = _flag(
        "info", "How much is logged.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = _flag(
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
            f"{flag_name(name)} must not be empty"
            for name in ("api_key", "admin_api_key")
            if getattr(self, name) == ""
        ]
        if self.api_key is not None and self.api_key == self.admin_api_key:
            found.append("--admin-api-key must be another one than --api-key, or there is no use")
        if not 0 <= self.port <= 65535:
            found.append(f"--port is a number up to 65535, not {self.port}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How many engines stand behind one server; more than one run as Ray Serve replicas."""

    replicas: int = _flag(1, "Engines behind this server; above 1, Ray Serve runs them.")
    cpus_per_replica: float = _flag(
        1.0, "CPUs that Ray keeps for each; threads of their arithmetic, too."
    )
    gpus_per_replica: float = _flag(0.0, "GPUs that Ray keeps for each.")
    ray_address: str | None = _flag(
        None, "Ray cluster to run them in (auto: the one of this machine); a new one without it."
    )

    def problems(self) -> list[str]:
        found = positive(self, "replicas", "cpus_per_replica")
        if not (math.isfinite(self.gpus_per_replica) and self.gpus_per_replica >= 0):
            found.append(f"--gpus-per-replica is 0 or more, not {self.gpus_per_replica}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine needs; a server adds ServerConfig."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    fuzzy: FuzzyConfig = FuzzyConfig()
    scheduler: SchedulerConfig = SchedulerConfig()

    def validate(self) -> None:
        """Raise ConfigError with every problem at once."""
        validate(self.model, self.cache, self.fuzzy, self.scheduler)


def validate(*groups: Any) -> None:
    """Raise ConfigError naming every problem of every group."""

    found: list[str] = []
    for group in groups:
        found += group.problems()
        for item in fields(group):
            allowed = choices_of(item.metadata.get("choices"))
            value = getattr(group, item.name)
            if allowed and value not in allowed:
                found.append(
                    f"{flag_name(item.name)} is one of {', '.join(allowed)}, not {value!r}"
                )
    if found:
        raise ConfigError(found)


def _unreadable_events(text: str | None) -> list[str]:
    try:
        if text is not None:
            EventsConfig.parse(text)
    except ConfigError as error:
        return list(error.problems)
    return []
