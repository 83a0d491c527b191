"""What is counted and measured of loads and saves."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

_OLD_SHARE = 0.8
"""Of the past, in a measured speed."""


@dataclass(slots=True)
class OffloadCounters:
    """Since start, in tokens unless the name says otherwise."""

    loaded: int = 0
    saved: int = 0
    loads: int = 0
    """Paths read for requests."""
    late_loads: int = 0
    """Requests that went ahead without what was being read."""
    declined_loads: int = 0
    """Paths that were not read: computing is faster."""
    dropped_saves: int = 0
    """Requests whose KV was not written: too many waited, or it was evicted first."""
    damaged_pages: int = 0


@dataclass(slots=True)
class Speeds:
    """As measured; None: not known yet."""

    compute: float | None = None
    """Tokens of prompts per second."""
    read: float | None = None
    """Bytes per second, from the folder to the cache."""

    def to_json(self) -> bytes:
        return json.dumps([self.compute, self.read]).encode()

    @staticmethod
    def from_json(data: bytes) -> Speeds:
        """What `to_json` gave; nothing is known if it is damaged."""
        try:
            given = [None if one is None else float(one) for one in json.loads(data)]
            if all(one is None or (math.isfinite(one) and one > 0) for one in given):
                return Speeds(*given)
        except (ValueError, TypeError):
            pass
        return Speeds()


def mean(known: float | None, new: float) -> float:
    """The measured speed after a new measurement."""
    return new if known is None else _OLD_SHARE * known + (1 - _OLD_SHARE) * new
