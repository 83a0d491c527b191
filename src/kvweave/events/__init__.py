"""Cache events for other processes: what KV an engine holds, said as vLLM and SGLang say it.

Publishing and following need the extra `kvweave[events]`, which is imported when it is used.
"""

from __future__ import annotations

from kvweave.config.events import FLAG, EventsConfig
from kvweave.errors import ConfigError
from kvweave.prefix.events import EventSink


def open_sink(config: EventsConfig) -> EventSink:
    """A running publisher. ConfigError says what it lacks, or which address cannot be had."""
    try:
        from kvweave.events.publisher import ZmqPublisher
    except ModuleNotFoundError as missing:
        raise ConfigError(
            [f"{FLAG} needs {missing.name}, which pip install 'kvweave[events]' brings"]
        ) from None
    return ZmqPublisher(config)
