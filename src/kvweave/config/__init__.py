"""Every setting, in one frozen dataclass per area; the command line is derived from them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvweave.config.base import as_flag, groups_of, settings_of, validate
from kvweave.config.cache import CacheConfig, EventsConfig, SchedulerConfig, SpeculativeConfig
from kvweave.config.fuzzy import FuzzyConfig
from kvweave.config.model import ModelConfig
from kvweave.config.server import ClusterConfig, ServerConfig
from kvweave.plugins import BACKENDS, moving_backends

__all__ = [
    "CacheConfig",
    "ClusterConfig",
    "EngineConfig",
    "EventsConfig",
    "FuzzyConfig",
    "ModelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "validate",
]

log = logging.getLogger("kvweave.config")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine needs; a server adds ServerConfig."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    fuzzy: FuzzyConfig = field(default_factory=FuzzyConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    def warn_without_effect(self, given: Iterable[str]) -> None:
        """Log which of the `given` settings the chosen backend does not read."""
        backend = self.cache.prefix_cache_backend
        if self.cache.kv_store is not None and not BACKENDS[backend].keeps:
            log.warning(
                "without effect: --kv-store; --prefix-cache-backend %s keeps no KV", backend
            )
        flags = [as_flag(name) for name in settings_of(FuzzyConfig) if name in set(given)]
        if flags and backend not in moving_backends():
            log.warning(
                "without effect: %s; --prefix-cache-backend %s moves no text, unlike %s",
                ", ".join(flags),
                backend,
                ", ".join(moving_backends()),
            )

    def validate(self) -> None:
        """Raise ConfigError with every problem at once."""
        validate(*groups_of(self))
