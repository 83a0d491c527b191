"""Settings of the KV cache: its backend, its size and its eviction policy."""

from __future__ import annotations

from dataclasses import dataclass

from kvweave.config.base import flag, positive, share
from kvweave.config.events import EventsConfig
from kvweave.errors import ConfigError


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
