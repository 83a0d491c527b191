"""From what SGLang gives a factory to a cache that lends moved KV, or a sentence why not."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.runtime_context import get_schedule

from kvweave.integrations.sglang.cache import FuzzyRadixCache
from kvweave.integrations.sglang.checks import check_stack
from kvweave.integrations.sglang.layers import inspect_layers
from kvweave.integrations.sglang.mirror import Mirror
from kvweave.integrations.sglang.mover import PoolMover
from kvweave.integrations.sglang.settings import read_settings

_log = logging.getLogger(__name__)


def build_cache(context: Any) -> FuzzyRadixCache:
    """See `kvweave.integrations.sglang.build`."""
    config = read_settings()
    check_stack(context)
    runner, allocator = context.tp_worker.model_runner, context.params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    layouts = inspect_layers(
        runner.model,
        range(pool.start_layer, pool.start_layer + pool.layer_num),
        hidden_size=context.model_config.hidden_size,
        context_length=context.model_config.context_len,
        dtype=context.model_config.dtype,
        device=torch.device(pool.device),
    )
    overlapped = not get_schedule().disable_overlap_schedule
    mover = PoolMover(pool, layouts, runner.forward_stream if overlapped else None)
    size = context.params.page_size
    mirror = Mirror(size, max(1, allocator.size // size), config)
    cache: FuzzyRadixCache = create_unified_radix_cache(context, cache_class=FuzzyRadixCache)
    cache.attach(mirror, mover, alone=context.tp_size == 1)
    _log.info("kvweave lends moved KV: %s", config)
    return cache
