"""Creates a prefix cache backend by its name; `kvweave.plugins` lists the names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvweave.errors import ConfigError
from kvweave.kv.pool import PagePool
from kvweave.plugins import BACKENDS, load
from kvweave.prefix.contract import CacheOptions, PrefixCache

if TYPE_CHECKING:
    from kvweave.kv.relocation import KVMover


def approximate_backends() -> tuple[str, ...]:
    """Backends whose answers may depend on what else was cached."""
    return tuple(name for name, backend in BACKENDS.items() if backend.exact is not None)


def exact_form(name: str) -> str | None:
    """The backend that serves exactly where `name` is approximate; None if `name` is exact."""
    return BACKENDS[name].exact


def create_cache(
    name: str, pool: PagePool, options: CacheOptions, mover: KVMover | None = None
) -> PrefixCache:
    """The backend called `name`. Those that move KV need a `mover`; the others ignore it."""
    backend = BACKENDS.get(name)
    if backend is None:
        raise ConfigError(
            [f"there is no prefix cache backend {name!r}; there are {', '.join(BACKENDS)}"]
        )
    if backend.moves and mover is None:
        raise ConfigError([f"the backend {name!r} moves KV, but nothing here can move any"])
    create: Any = load(backend.path)
    cache: PrefixCache = create(pool, options, mover) if backend.moves else create(pool, options)
    return cache
