"""The fuzzy providers by name: the built-in one, and those that other packages bring."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TypeAlias, cast

from kvweave.config import FuzzyConfig
from kvweave.errors import ConfigError
from kvweave.fuzzy.provider import Donors, FuzzyMatchProvider

ProviderFactory: TypeAlias = Callable[[Donors, FuzzyConfig], FuzzyMatchProvider]

GROUP = "kvweave.fuzzy_providers"
"""The entry point group in which packages offer a `ProviderFactory` under a name."""

_BUILT_IN = {
    "spans": "kvweave.fuzzy.index:SpanIndex",
    "semblend": "kvweave.fuzzy.semblend:SemblendProvider",
    "semantic": "kvweave.fuzzy.semantic.provider:SemanticProvider",
}


def provider_names() -> tuple[str, ...]:
    """All names that `create_provider` knows, the built-in ones first."""
    return (*_BUILT_IN, *sorted(set(_offered()) - set(_BUILT_IN)))


def create_provider(name: str, donors: Donors, config: FuzzyConfig) -> FuzzyMatchProvider:
    """The provider called `name`; ConfigError if there is none, or its package does not load."""
    try:
        return _factory(name)(donors, config)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError([f"the fuzzy provider {name!r} does not start: {error}"]) from error


def _factory(name: str) -> ProviderFactory:
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return cast(ProviderFactory, getattr(import_module(module), attribute))
    offered = _offered().get(name)
    if offered is None:
        names = ", ".join(provider_names())
        raise ConfigError([f"there is no fuzzy provider {name!r}; there are {names}"])
    return cast(ProviderFactory, offered.load())


def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
