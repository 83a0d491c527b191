"""Names, types, reading and checks of settings, for all groups.

A group is a frozen dataclass. Its class attribute PREFIX, if there is one, stands in front of every
field's name in flags, files and the environment. A field's `metadata` carries the `help` of its
flag, and `choices` where only some values work. `problems()` of a group checks its numbers.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from kvweave.errors import ConfigError
from kvweave.plugins import choices_of

WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "texts",
}
"""The types of settings, in words."""

_TRUTHS = {"true": True, "false": False}


def flag(default: Any, help: str, **extra: Any) -> Any:
    """A field with its default and the metadata of its flag."""
    return field(default=default, metadata={"help": help, **extra})


def as_flag(setting: str) -> str:
    """The command line's spelling of a setting's name."""
    return "--" + setting.replace("_", "-")


def flag_name(group: Any, name: str) -> str:
    """The command line's spelling of a field."""
    return as_flag(_setting(group, name))


def _setting(group: Any, name: str) -> str:
    prefix: str = getattr(group, "PREFIX", "")
    return prefix + name


# The following functions take groups and dataclasses of groups, such as EngineConfig.


def groups_of(*configs: Any) -> Iterator[Any]:
    """The groups that `configs` are or consist of."""
    for config in configs:
        nested = [item for item in fields(config) if item.default_factory is not MISSING]
        for item in nested:
            yield item.default_factory if isinstance(config, type) else getattr(config, item.name)
        if not nested:
            yield config


def settings_of(*configs: Any) -> dict[str, Field[Any]]:
    """Fields by their settings' names."""
    return {
        _setting(group, item.name): item for group in groups_of(*configs) for item in fields(group)
    }


def values_of(*configs: Any) -> dict[str, Any]:
    """Values by their settings' names."""
    return {
        _setting(group, item.name): getattr(group, item.name)
        for group in groups_of(*configs)
        for item in fields(group)
    }


def kinds_of(*configs: type) -> dict[str, type]:
    """Types by their settings' names; `int | None` is int, and `tuple[str, ...]` is tuple."""
    return {
        _setting(group, name): _kind(hint)
        for group in groups_of(*configs)
        for name, hint in get_type_hints(group).items()
        if get_origin(hint) is not ClassVar
    }


def _kind(hint: Any) -> type:
    if get_origin(hint) is tuple:
        return tuple
    kind: type = next(kind for kind in (*get_args(hint), hint) if kind is not type(None))
    return kind


def read(
    given: Iterable[tuple[str, Any]],
    kinds: Mapping[str, type],
    problems: list[str],
    spell: Callable[[str], str] = repr,
    where: str = "",
) -> dict[str, Any]:
    """Values by setting's name, in the types that `kinds` says.

    `given` holds names, and values as texts or as JSON types them; None leaves a setting as it is.
    Unknown names and unreadable values are added to `problems`, spelt by `spell`, after `where`.
    """
    values = {}
    for name, value in given:
        if name not in kinds:
            hint = did_you_mean(spell(name), map(spell, kinds))
            problems.append(f"{where}there is no setting {spell(name)}{hint}")
        elif value is not None:
            try:
                values[name] = _convert(kinds[name], value)
            except (ValueError, TypeError, KeyError, OverflowError):
                words = WORDS[kinds[name]]
                problems.append(f"{where}{spell(name)} takes {words}, not {value!r}")
    return values


def _convert(kind: type, value: Any) -> Any:
    if kind is tuple:
        texts = (value,) if isinstance(value, str) else tuple(value)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError
        return texts
    if isinstance(value, str):
        return _TRUTHS[value.lower()] if kind is bool else kind(value)
    number = type(value) in (int, float) and kind in (int, float)
    if type(value) is not kind and not (number and kind(value) == value):
        raise ValueError
    return kind(value)


def make(
    configs: Iterable[type], values: Mapping[str, Any], problems: Iterable[str] = ()
) -> list[Any]:
    """One instance of each of `configs`, with the `values` that it has settings for.

    Raises ConfigError with the given `problems`, and with those of all groups.
    """
    made = [_make(config, values) for config in configs]
    validate(*groups_of(*made), problems=problems)
    return made


def _make(config: Any, values: Mapping[str, Any]) -> Any:
    given = {}
    for item in fields(config):
        if item.default_factory is not MISSING:
            given[item.name] = _make(item.default_factory, values)
        elif (name := _setting(config, item.name)) in values:
            given[item.name] = values[name]
    return config(**given)


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """A hint at the nearest known name, or an empty text."""
    close = difflib.get_close_matches(wrong, list(known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def positive(group: Any, *names: str) -> list[str]:
    """Problems of the named fields that are neither None nor finite and above 0."""
    found = []
    for name in names:
        value = getattr(group, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            found.append(f"{flag_name(group, name)} must be above 0, not {value}")
    return found


def share(group: Any, *names: str) -> list[str]:
    """Problems of the named fields that are set, and not from 0 to 1."""
    given = {name: getattr(group, name) for name in names}
    return [
        f"{flag_name(group, name)} is a share from 0 to 1, not {value}"
        for name, value in given.items()
        if value is not None and not 0 <= value <= 1
    ]


def validate(*groups: Any, problems: Iterable[str] = ()) -> None:
    """Raise ConfigError naming the given `problems` and every problem of every group."""
    found = list(problems)
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
