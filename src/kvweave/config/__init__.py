"""Every setting, in one frozen dataclass per area; the command line is derived from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvweave.config.base import validate
from kvweave.config.cache import CacheConfig
from kvweave.config.cluster import ClusterConfig
from kvweave.config.events import EventsConfig
from kvweave.config.fuzzy import FuzzyConfig
from kvweave.config.model import ModelConfig
from kvweave.config.scheduler import SchedulerConfig
from kvweave.config.server import ServerConfig

__all__ = [
    "CacheConfig",
    "ClusterConfig",
    "EngineConfig",
    "EventsConfig",
    "FuzzyConfig",
    "ModelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "validate",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine needs; a server adds ServerConfig."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    fuzzy: FuzzyConfig = field(default_factory=FuzzyConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def validate(self) -> None:
        """Raise ConfigError with every problem at once."""
        validate(self.model, self.cache, self.fuzzy, self.scheduler)
