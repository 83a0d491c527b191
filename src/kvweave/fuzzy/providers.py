"""The fuzzy providers by name: the built-in ones, and those that other packages bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.offers import Offers
from kvweave.fuzzy.provider import Donors, FuzzyMatchProvider

ProviderFactory: TypeAlias = Callable[[Donors, FuzzyConfig], FuzzyMatchProvider]

GROUP = "kvweave.fuzzy_providers"
"""The entry point group in which packages offer a `ProviderFactory` under a name."""

_OFFERS = Offers(
    "fuzzy provider",
    GROUP,
    {
        "spans": "kvweave.fuzzy.index:SpanIndex",
        "semblend": "kvweave.fuzzy.semblend:SemblendProvider",
        "semantic": "kvweave.fuzzy.semantic.provider:SemanticProvider",
    },
)


def provider_names() -> tuple[str, ...]:
    """All names that `create_provider` knows, the built-in ones first."""
    return _OFFERS.names()


def create_provider(name: str, donors: Donors, config: FuzzyConfig) -> FuzzyMatchProvider:
    """The provider called `name`; ConfigError if there is none, or its package does not load."""
    return cast(FuzzyMatchProvider, _OFFERS.make(name, donors, config))
