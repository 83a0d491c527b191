"""What settings have in common: how they are called, and what numbers they may be."""

from __future__ import annotations

import math
from typing import Any


def flag_name(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


def positive(group: Any, *names: str) -> list[str]:
    """Problems of the named fields that are neither None nor finite and above 0."""
    found = []
    for name in names:
        value = getattr(group, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            found.append(f"{flag_name(name)} must be above 0, not {value}")
    return found


def share(group: Any, *names: str) -> list[str]:
    """Problems of the named fields that are not from 0 to 1."""
    return [
        f"{flag_name(name)} is a share from 0 to 1, not {getattr(group, name)}"
        for name in names
        if not 0 <= getattr(group, name) <= 1
    ]
