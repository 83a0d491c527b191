"""Settings of the plug-in, from the environment and from a file: SGLang has no place for its flags.

`KVWEAVE_FUZZY_MIN_SPAN=64` sets what `--fuzzy-min-span 64` sets in kvweave's own engine, and so on
for every name in `NAMES`. `KVWEAVE_SGLANG_CONFIG` names a JSON file with the same settings under
their short names, `{"min_span": 64}`; the environment wins over the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from kvweave.config import FuzzyConfig
from kvweave.config.base import flag_name
from kvweave.errors import ConfigError, reason

NAMES = ("min_span", "min_suffix", "min_reuse_ratio", "sink_tokens", "stride", "max_share")
"""What can be set. What the list lacks of FuzzyConfig, SGLang's contract has no place for."""

FILE = "KVWEAVE_SGLANG_CONFIG"
_PREFIX = "KVWEAVE_FUZZY_"


def read_settings(environment: Mapping[str, str] | None = None) -> FuzzyConfig:
    """The settings that `environment` (the process's own without it) and its file give.

    Raises ConfigError that names everything that is wrong, each by the name it was given under.
    """
    environment = os.environ if environment is None else environment
    problems: list[str] = []
    given = _from_file(environment.get(FILE), problems)
    for variable, text in environment.items():
        if variable.startswith(_PREFIX):
            given[variable.removeprefix(_PREFIX).lower()] = (variable, text)
    values: dict[str, Any] = {}
    for name, (source, value) in given.items():
        if name in NAMES:
            _convert(name, source, value, values, problems)
        else:
            problems.append(f"{source} is no setting of the plug-in; it has {_spelled(NAMES)}")
    config = FuzzyConfig(**values)
    problems += [_in_our_words(problem) for problem in config.problems()]
    if problems:
        raise ConfigError(problems)
    return config


def _from_file(path: str | None, problems: list[str]) -> dict[str, tuple[str, Any]]:
    """Short names to (how it was spelled, value)."""
    if not path:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        problems.append(f"{FILE}={path} cannot be read as JSON: {reason(error)}")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{FILE}={path} must hold one JSON object, name to value")
        return {}
    return {name: (f"{name!r} in {path}", value) for name, value in content.items()}


def _convert(
    name: str, source: str, value: Any, values: dict[str, Any], problems: list[str]
) -> None:
    kind = type(getattr(FuzzyConfig(), name))
    what = "a whole number" if kind is int else "a number"
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        if not (isinstance(value, str) or number) or (number and kind(value) != value):
            raise ValueError
        values[name] = kind(value)
    except (ValueError, OverflowError):
        problems.append(f"{source} must be {what}, not {value!r}")


def _in_our_words(problem: str) -> str:
    """A problem that names flags, with the names that the plug-in's settings have."""
    for name in NAMES:
        problem = problem.replace(flag_name(FuzzyConfig, name), _PREFIX + name.upper())
    return problem


def _spelled(names: tuple[str, ...]) -> str:
    return ", ".join(_PREFIX + name.upper() for name in names)
