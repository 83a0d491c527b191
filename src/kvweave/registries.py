"""Names that people may choose from, wherever a flag offers a choice that code can extend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def choices_of(source: Any) -> tuple[str, ...]:
    """The values behind a field's `choices`: a tuple as it is, a registry's by its name."""
    if source is None:
        return ()
    if isinstance(source, str):
        return _REGISTRIES[source]()
    return tuple(source)


def _backends() -> tuple[str, ...]:
    from kvweave.prefix.registry import backend_names

    return backend_names()


def _providers() -> tuple[str, ...]:
    from kvweave.fuzzy.providers import provider_names

    return provider_names()


def _embedders() -> tuple[str, ...]:
    from kvweave.fuzzy.semantic.embedders import embedder_names

    return embedder_names()


def _verifiers() -> tuple[str, ...]:
    from kvweave.fuzzy.verifiers import verifier_names

    return verifier_names()


def _refresh_strategies() -> tuple[str, ...]:
    from kvweave.fuzzy.refresh import STRATEGIES

    return tuple(STRATEGIES)


_REGISTRIES: dict[str, Callable[[], tuple[str, ...]]] = {
    "prefix-cache-backends": _backends,
    "fuzzy-providers": _providers,
    "embedders": _embedders,
    "verifiers": _verifiers,
    "fuzzy-refresh-strategies": _refresh_strategies,
}
