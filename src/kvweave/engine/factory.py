"""Builds the components of an engine: KV memory, attention, prefix cache, model runner."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvweave.config import EngineConfig, FuzzyConfig
from kvweave.config.cache import EventsConfig
from kvweave.engine.attention import get_backend
from kvweave.engine.execution.executor import EngineComponents
from kvweave.engine.execution.runner import ModelRunner
from kvweave.engine.execution.threads import StepThreads
from kvweave.errors import ConfigError
from kvweave.events import open_sink
from kvweave.fuzzy.recompute import SEAMS, STRATEGIES
from kvweave.kv.pool import IntArray, PagePool
from kvweave.kv.relocation import KVMover, TensorMover
from kvweave.kv.tensors import KVTensors
from kvweave.models import hooks
from kvweave.models.cpu import free_bytes
from kvweave.models.load import LoadedModel
from kvweave.plugins import BACKENDS
from kvweave.prefix.base import create_cache
from kvweave.prefix.contract import CacheOptions, PrefixCache
from kvweave.store.offloader import Offloader
from kvweave.store.pages import PageFormat, PageStore

logger = logging.getLogger("kvweave.engine")


def build_components(
    config: EngineConfig,
    loaded: LoadedModel,
    make_mover: Callable[[KVTensors], KVMover] = TensorMover,
) -> EngineComponents:
    """Raises ConfigError where flags and model, or flags and memory, do not go together.

    `make_mover` makes the mover of KV; benches that move it wrongly on purpose pass their own.
    """
    cache_config = config.cache
    page_size = cache_config.page_size
    num_pages = pool_tokens(config, loaded) // page_size
    pool = PagePool(num_pages, page_size)
    kv = KVTensors(
        loaded.layouts, num_pages, page_size, dtype=loaded.kv_dtype, device=loaded.device
    )
    wanted = EventsConfig.wanted(cache_config.kv_events_config)
    options = CacheOptions(
        eviction=cache_config.radix_eviction_policy,
        retention_share=cache_config.cache_retention_share,
        events=wanted is not None,
        wait_for_pending=cache_config.cold_group_wait,
        fuzzy=_fuzzy(config, loaded),
        decode=decoder(loaded.tokenizer),
    )
    cache = create_cache(cache_config.prefix_cache_backend, pool, options, make_mover(kv))
    attention = get_backend(config.model.attention_backend, loaded.device)
    logger.info(
        "KV pool: %d tokens in pages of %d, %.2f GB, %s (%s) on %s",
        num_pages * page_size,
        page_size,
        num_pages * page_size * KVTensors.bytes_per_slot(loaded.layouts, loaded.kv_dtype) / 1e9,
        str(loaded.kv_dtype).removeprefix("torch."),
        loaded.kv_dtype_because,
        loaded.device,
    )
    runner = ModelRunner(loaded, kv, attention)
    # Last: it takes addresses, and starts a thread.
    events = None if wanted is None else open_sink(wanted)
    store = open_store(config, loaded.identity, cache, kv)
    threads = None
    if loaded.device.type == "cpu":
        readers = (lambda: 0) if store is None else store.readers_at_work
        threads = StepThreads(config.model.threads, yielding=readers)
    return EngineComponents(pool, cache, runner, events, hooks.interruptible, store, threads)


def open_store(
    config: EngineConfig, identity: str, cache: PrefixCache, kv: KVTensors
) -> Offloader | None:
    """What keeps KV on disk, if that is wanted; a folder that cannot be used is only logged."""
    settings, fuzzy = config.cache, config.fuzzy
    backend = BACKENDS[settings.prefix_cache_backend]
    if settings.kv_store is None or not backend.keeps:
        return None
    page_format = PageFormat(identity, cache.page_size, kv.page_bytes, str(kv.dtype))
    moves = backend.moves and fuzzy.max_share > 0
    try:
        store = PageStore(Path(settings.kv_store), page_format, int(settings.kv_store_gb * 1e9))
        return Offloader(
            cache,
            kv,
            store,
            stride=fuzzy.stride,
            shortest_span=fuzzy.min_span if moves else None,
        )
    except (OSError, sqlite3.Error) as error:
        logger.warning(
            "KV is not kept on disk: the folder %s cannot be used (%s)",
            settings.kv_store,
            error,
        )
        return None


def decoder(tokenizer: Any) -> Callable[[IntArray], str]:
    """Token ids to unchanged text, for caches that compare the text of prompts."""

    def decode(ids: IntArray) -> str:
        text: str = tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        return text

    return decode


def _fuzzy(config: EngineConfig, loaded: LoadedModel) -> FuzzyConfig:
    """The settings for reuse beyond the prefix, as far as model and device can follow them."""
    fuzzy = config.fuzzy
    if loaded.device.type != "cpu":
        # Attention there would read rows with shared spans one by one; a copy is quick.
        fuzzy = replace(fuzzy, share_span=0)
    if loaded.prunes_tokens or not STRATEGIES[fuzzy.refresh_strategy].deferred:
        return fuzzy
    if fuzzy.refresh:
        logger.warning(
            "--fuzzy-refresh-strategy %s does not work with this model, whose layers must all see "
            "the same tokens: what is refreshed is chosen by seams instead",
            fuzzy.refresh_strategy,
        )
    return replace(fuzzy, refresh_strategy=SEAMS)


_CPU_CONTEXTS = 8
_CPU_TOKENS = 65_536
"""Without --max-total-tokens, a pool in a CPU's memory, which other programs want too, holds this
many prompts of full length, or this many tokens if that is more."""


def pool_tokens(config: EngineConfig, loaded: LoadedModel) -> int:
    """Slots of the pool: as configured, or as memory allows and the running requests can use."""
    page_size = config.cache.page_size
    if config.cache.max_total_tokens is not None:
        return config.cache.max_total_tokens // page_size * page_size
    free = free_bytes(loaded.device) * config.cache.mem_fraction_static
    affordable = int(free) // KVTensors.bytes_per_slot(loaded.layouts, loaded.kv_dtype)
    useful = config.scheduler.max_running_requests * loaded.context_length
    if loaded.device.type == "cpu":
        useful = min(useful, max(_CPU_CONTEXTS * loaded.context_length, _CPU_TOKENS))
    pages = min(affordable, useful) // page_size
    if pages < 1:
        raise ConfigError(
            ["there is no memory left for KV: free some, or raise --mem-fraction-static"]
        )
    return pages * page_size
