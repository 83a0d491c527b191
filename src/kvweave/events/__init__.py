"""Cache events for other processes, in the format of vLLM and SGLang.

Publishing and following import the packages of the extra `events`.
"""

from __future__ import annotations

from kvweave.config.cache import FLAG, EventsConfig
from kvweave.errors import ConfigError, extra
from kvweave.prefix.events import EventSink


def open_sink(config: EventsConfig) -> EventSink:
    """A running publisher. ConfigError names a missing package or an address that is not free."""
    try:
        from kvweave.events.publisher import ZmqPublisher
    except ModuleNotFoundError as missing:
        raise ConfigError(
            [f"{FLAG} needs {missing.name}, which {extra('events')} brings"]
        ) from None
    return ZmqPublisher(config)
