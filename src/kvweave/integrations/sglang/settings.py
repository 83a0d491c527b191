"""Settings of the SGLang plug-in, read from the environment and from a JSON file.

`KVWEAVE_FUZZY_MIN_SPAN=64` sets what `--fuzzy-min-span 64` sets in kvweave's own engine, and so on
for every name in `NAMES`. `KVWEAVE_SGLANG_CONFIG` names a JSON file with the same settings under
their short names, `{"min_span": 64}`; the environment wins over the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvweave.config import FuzzyConfig
from kvweave.config.base import flag, flag_name, read
from kvweave.errors import ConfigError, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig(FuzzyConfig):
    """The settings of the plug-in: some of the engine's own, and one that only SGLang needs."""

    min_chunk_span: int = flag(64, "Shortest run of tokens that a prefill chunk is ended for.")

    def problems(self) -> list[str]:
        found = FuzzyConfig.problems(self)
        if self.min_chunk_span < 1:
            name = flag_name(self, "min_chunk_span")
            found.append(f"{name} must be 1 or more, not {self.min_chunk_span}")
        return found


NAMES = (
    "min_span",
    "min_suffix",
    "min_reuse_ratio",
    "sink_tokens",
    "stride",
    "max_share",
    "refresh_tokens",
    "min_chunk_span",
)
"""What can be set. What the list lacks of PluginConfig, SGLang's contract has no place for."""

FILE = "KVWEAVE_SGLANG_CONFIG"
_PREFIX = "KVWEAVE_FUZZY_"


def read_settings(environment: Mapping[str, str] | None = None) -> PluginConfig:
    """The settings that `environment` (the process's own without it) and its file give.

    Raises ConfigError that names everything that is wrong, each by the name it was given under.
    """
    environment = os.environ if environment is None else environment
    problems: list[str] = []
    variables = {
        variable.removeprefix(_PREFIX).lower(): text
        for variable, text in environment.items()
        if variable.startswith(_PREFIX)
    }
    path = environment.get(FILE)
    values = _known(_from_file(path, problems), problems, lambda name: f"{name!r} in {path}")
    values |= _known(variables, problems, _variable)
    config = PluginConfig(**values)
    problems += [_in_our_words(problem) for problem in config.problems()]
    if problems:
        raise ConfigError(problems)
    return config


def _known(
    given: Mapping[str, Any], problems: list[str], spell: Callable[[str], str]
) -> dict[str, Any]:
    problems += [
        f"{spell(name)} is no setting of the plug-in; it has {', '.join(map(_variable, NAMES))}"
        for name in given
        if name not in NAMES
    ]
    kinds = {name: type(getattr(PluginConfig(), name)) for name in NAMES}
    return read([item for item in given.items() if item[0] in NAMES], kinds, problems, spell)


def _variable(name: str) -> str:
    return _PREFIX + name.upper()


def _from_file(path: str | None, problems: list[str]) -> Mapping[str, Any]:
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
    return content


def _in_our_words(problem: str) -> str:
    """A problem that names flags, with the names that the plug-in's settings have."""
    for name in NAMES:
        problem = problem.replace(flag_name(PluginConfig, name), _variable(name))
    return problem
