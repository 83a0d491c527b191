"""kvweave as an SGLang plug-in: the radix cache backend `fuzzy_match`.

SGLang calls `register` in every one of its processes (entry-point group `sglang.srt.plugins`);
most of them never build a cache. So nothing is imported here but SGLang's own registry, and the
rest only when a scheduler asks for the backend by `--radix-cache-backend fuzzy_match`.
"""

from __future__ import annotations

import logging
from typing import Any

from kvweave.integrations import BACKEND
from kvweave.integrations.sglang.chunks import register_hooks

_log = logging.getLogger(__name__)


def register() -> None:
    """Offer the backend to SGLang. Calling it again changes nothing."""
    try:
        from sglang.srt.mem_cache.registry import (
            get_radix_cache_factory,
            register_radix_cache_backend,
        )
    except ImportError as error:
        _log.warning(
            "kvweave: this SGLang has no registry of radix cache backends (0.5.23 has), "
            "so --radix-cache-backend %s cannot be offered: %s",
            BACKEND,
            error,
        )
        return
    offered = get_radix_cache_factory(BACKEND)
    if offered is None:
        register_radix_cache_backend(BACKEND, build)
        try:
            register_hooks()
        except ImportError as error:
            _log.warning("kvweave: this SGLang has no hooks for plug-ins: %s", error)
    elif offered is not build:
        _log.warning(
            "kvweave: another plug-in has registered the radix cache backend %r already; "
            "kvweave's is not available",
            BACKEND,
        )


def build(context: Any) -> Any:
    """The factory: SGLang's TreeCacheBuildContext to a cache.

    Raises ConfigError for settings that do not work, and UnsupportedModelError for a model or an
    SGLang set up in a way that moved KV does not fit; both say all there is to say at once.
    """
    from kvweave.integrations.sglang.cache import build_cache

    return build_cache(context)
