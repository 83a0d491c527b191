"""kvweave as an SGLang plug-in: the radix cache backend `fuzzy_match`, and hooks on prefill.

SGLang calls `register` in every one of its processes (entry-point group `sglang.srt.plugins`);
most of them never build a cache. So nothing is imported here but SGLang's own registries, and the
rest only when a scheduler asks for the backend by `--radix-cache-backend fuzzy_match`.

SGLang computes a long prompt in chunks and adds them to batches by `PrefillAdder`. One hook ends a
chunk where the next run begins. Before the next chunk, another fills slots with that run, writes
them into the request's row and moves the request's prefix behind it, so the run is not computed.

    _select_prefill_admission   a new request: its first chunk ends at a run
    add_chunked_req             a request in chunks: lend the run, end the chunk at the next one
    get_internal_state          /server_info shows what was lent

With other caches than ours, the hooks do nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from kvweave.integrations import BACKEND

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

    Raises ConfigError for wrong settings, and UnsupportedModelError for a model, an SGLang or flags
    that do not allow moved KV. Both list all problems at once.
    """
    from kvweave.integrations.sglang.cache import build_cache

    return build_cache(context)


_SCHEDULER = "sglang.srt.managers"
ADDER = f"{_SCHEDULER}.schedule_policy.PrefillAdder"
STATE = f"{_SCHEDULER}.scheduler_components.internal_state.SchedulerInternalStateController"


def register_hooks() -> None:
    """Enter the hooks into SGLang's registry, which applies them once all plug-ins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind in (
        (f"{ADDER}._select_prefill_admission", first_chunk, HookType.AROUND),
        (f"{ADDER}.add_chunked_req", next_chunk, HookType.AROUND),
        (f"{STATE}.get_internal_state", add_state, HookType.AFTER),
    ):
        HookRegistry.register(target, hook, kind)


def first_chunk(original: Callable[..., Any], adder: Any, req: Any, **options: Any) -> Any:
    """Around `_select_prefill_admission`: the chunk of a new request ends where a run begins."""
    cache = _ours(adder)
    if cache is None:
        return original(adder, req, **options)
    position = req.prefix_len + options["host_hit_length"]
    budget = adder.rem_chunk_tokens
    loans = cache.loans_behind(req, position)
    if loans and budget is not None:
        adder.rem_chunk_tokens = min(budget, loans[0].run.start - position)
    try:
        admission = original(adder, req, **options)
    finally:
        adder.rem_chunk_tokens = budget
    if not getattr(admission, "is_chunked", False):
        return admission
    if options["has_chunked_req"] or adder.new_chunked_req is not None:
        # SGLang keeps at most one request in chunks. Its own chunks fill a batch, so it never
        # meets a second one; a chunk that ends at a run leaves room for one.
        from sglang.srt.managers.schedule_policy import AddReqResult

        return AddReqResult.OTHER
    cache.loans[req] = deque(loans)
    return admission


def next_chunk(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """Around `add_chunked_req`: lend what begins here, and end the chunk at the next run."""
    cache = _ours(adder)
    if cache is None or not (loans := cache.loans.get(req)):
        return original(adder, req)
    try:
        while loans and loans[0].run.start <= req.prefix_len:
            _lend(cache, adder, req, loans.popleft())
    except Exception:
        cache.fault("lending between chunks")
        loans.clear()
    if loans:
        ends = [loans[0].run.start - req.prefix_len, adder.chunked_req_limit]
        adder.chunked_req_limit = min(end for end in ends if end is not None)
    return original(adder, req)


def _lend(cache: Any, adder: Any, req: Any, loan: Any) -> None:
    """Put the run into the request's row; without its donors or room, it will be computed."""
    run, kv = loan.run, req.kv
    if run.start != req.prefix_len:
        return  # SGLang ended a chunk elsewhere
    # The next chunk needs room, too, or SGLang would have none for it and stop.
    ends = [len(req.full_untruncated_fill_ids), *(at.run.start for at in cache.loans[req])]
    following = min(min(ends) - run.end, adder.rem_chunk_tokens)
    if run.length + following + 2 * adder.page_size > adder.rem_total_tokens:
        cache.counts.add("no_room")
        return
    slots = cache.filled(req, loan)
    if slots is None:
        return
    try:
        cache.req_to_token_pool.write((kv.req_pool_idx, slice(run.start, run.end)), slots)
    except Exception:
        cache.token_to_kv_pool_allocator.free(slots)
        raise
    kv.kv_allocated_len = kv.kv_committed_len = run.end
    req.prefix_len = req.extend_end = run.end
    cache.lent(req, run)
    adder.log_hit_tokens += run.length
    if req.retracted_stain:  # SGLang counts what it served before the retraction
        adder.reprocessed_log_hit_tokens += run.length
    else:
        adder.log_host_hit_tokens += run.length
        req.cached_tokens_host += run.length


def add_state(result: Any, controller: Any, *_: Any) -> None:
    """After `get_internal_state`: what the plug-in has lent, for /server_info."""
    cache = controller.scheduler.tree_cache
    if hasattr(cache, "loans"):
        result.internal_state["kvweave"] = cache.state()


def _ours(adder: Any) -> Any | None:
    """The adder's cache if it is the plug-in's and lends runs between chunks; else None."""
    cache = adder.tree_cache
    return cache if getattr(cache, "chunked", False) and cache.lends else None
