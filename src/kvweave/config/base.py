"""What all groups of settings share: names, values by name, and checks.

A group is a frozen dataclass. Its class attribute PREFIX, if there is one, stands in front of every
field's name in flags, files and the environment. A field's `metadata` carries the `help` of its
flag, and `choices` where only some values work. `problems()` of a group checks its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any

from kvweave.errors import ConfigError
from kvweave.plugins import choices_of


def flag(default: Any, help: str, **extra: Any) -> Any:
    """A field with what its flag says."""
    return field(default=default, metadata={"help": help, **extra})


def setting_name(group: Any, name: str) -> str:
    """What files and keyword arguments call a field of `group`, an instance or its class."""
    prefix: str = getattr(group, "PREFIX", "")
    return prefix + name


def flag_name(group: Any, name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + setting_name(group, name).replace("_", "-")


def settings_of(group: Any) -> dict[str, Field[Any]]:
    """Fields by their settings' names."""
    return {setting_name(group, item.name): item for item in fields(group)}


def values_of(*groups: Any) -> dict[str, Any]:
    """Values of all `groups` by their settings' names."""
    return {
        name: getattr(group, item.name)
        for group in groups
        for name, item in settings_of(group).items()
    }


def leaves_of(kind: type) -> list[type]:
    """The groups that `kind` is made of: `kind` itself, or what its fields' factories make."""
    return list(_nested(kind).values()) or [kind]


def _nested(kind: Any) -> dict[str, Any]:
    """Groups by field; none where `kind` is a group itself."""
    return {
        item.name: item.default_factory
        for item in fields(kind)
        if item.default_factory is not MISSING
    }


def groups_of(config: Any) -> list[Any]:
    """The groups in `config`: itself, or its fields."""
    return [getattr(config, name) for name in _nested(config)] or [config]


def build(kind: Any, values: Mapping[str, Any]) -> Any:
    """A group, or a dataclass of groups, with the `values` that it has settings for."""
    if nested := _nested(kind):
        return kind(**{name: build(group, values) for name, group in nested.items()})
    settings = settings_of(kind)
    return kind(**{settings[name].name: values[name] for name in settings.keys() & values})


def positive(group: Any, *names: str) -> list[str]:
    """Problems of the named fields that are neither None nor finite and above 0."""
    found = []
    for name in names:
        value = getattr(group, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            found.append(f"{flag_name(group, name)} must be above 0, not {value}")
    return found


def share(group: Any, *names: str) -> list[str]:
    """Problems of the named fields that are not from 0 to 1."""
    return [
        f"{flag_name(group, name)} is a share from 0 to 1, not {getattr(group, name)}"
        for name in names
        if not 0 <= getattr(group, name) <= 1
    ]


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
                    f"{flag_name(group, item.name)} is one of {', '.join(allowed)}, not {value!r}"
                )
    if found:
        raise ConfigError(found)
