"""The backends by name. Nothing else in kvweave names one."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from kvweave.errors import ConfigError
from kvweave.kv.pool import PagePool
from kvweave.prefix.base import CacheOptions, PrefixCache

if TYPE_CHECKING:
    from kvweave.kv.mover import KVMover


class _Backend(NamedTuple):
    path: str
    """Imported when used, so that nobody loads what nobody chose."""
    moves: bool = False
    """Takes a KVMover as third argument."""
    exact: str | None = None
    """For backends that are approximate: the one that does the same without being so."""


_BACKENDS = {
    "none": _Backend("kvweave.prefix.none:NoCache"),
    "hash": _Backend("kvweave.prefix.hash:HashCache"),
    "radix": _Backend("kvweave.prefix.radix:RadixCache"),
    "fuzzy_match": _Backend("kvweave.fuzzy.backend:FuzzyCache", moves=True, exact="radix"),
}


def backend_names() -> tuple[str, ...]:
    return tuple(_BACKENDS)


def approximate_backends() -> tuple[str, ...]:
    """Those whose answers may depend on what else was cached."""
    return tuple(name for name, backend in _BACKENDS.items() if backend.exact is not None)


def exact_form(name: str) -> str | None:
    """The backend that serves exactly where `name` is approximate; None if `name` is exact."""
    return _BACKENDS[name].exact


def create_cache(
    name: str, pool: PagePool, options: CacheOptions, mover: KVMover | None = None
) -> PrefixCache:
    """The backend called `name`. Those that move KV need a `mover`; the others ignore it."""
    backend = _BACKENDS.get(name)
    if backend is None:
        raise ConfigError(
            [f"there is no prefix cache backend {name!r}; there are {', '.join(_BACKENDS)}"]
        )
    if backend.moves and mover is None:
        raise ConfigError([f"the backend {name!r} moves KV, but nothing here can move any"])
    module, _, attribute = backend.path.partition(":")
    create: Any = getattr(import_module(module), attribute)
    cache: PrefixCache = create(pool, options, mover) if backend.moves else create(pool, options)
    return cache
