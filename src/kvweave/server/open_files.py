"""Every connection is an open file, and a process may open only so many."""

from __future__ import annotations

import logging
import resource
from dataclasses import replace

from kvweave.config import ServerConfig
from kvweave.errors import ConfigError
from kvweave.server.lobby import PLACES

log = logging.getLogger("kvweave.server")

_OTHERS = 256
"""Files that are no connections: the model's, the log, events, pipes; with some to spare."""
_LEAST = 16


def with_files(config: ServerConfig) -> ServerConfig:
    """`config`, with no more connections than this process may open files.

    Raises its soft limit as far as needed and allowed. ConfigError if hardly any are left.
    """
    wanted = config.max_connections + PLACES + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unbounded = resource.RLIM_INFINITY
    if soft == unbounded or soft >= wanted:
        return config
    allowed = wanted if hard == unbounded else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return config
    room = allowed - PLACES - _OTHERS
    if room < min(_LEAST, config.max_connections):
        raise ConfigError(
            [
                f"this process may open {allowed} files, but {_LEAST + PLACES + _OTHERS} are the "
                "least that a server needs: raise the limit (ulimit -n, LimitNOFILE)"
            ]
        )
    log.warning(
        "this process may open %d files (ulimit -n, LimitNOFILE), which is room for %d "
        "connections, not for --max-connections %d",
        allowed,
        room,
        config.max_connections,
    )
    return replace(config, max_connections=room)
