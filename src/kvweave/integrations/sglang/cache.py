"""SGLang's radix cache with moved spans behind the exact prefix, and its factory.

The span takes the way that SGLang has for KV which is not on the device yet: `match_prefix`
reports it as a host hit, admission calls `init_load_back`, and that fills slots which belong to the
request.

What is approximate never spreads: a request that was lent a span never inserts anything again
(`skip_radix_cache_insert`), and its slots are freed with it. So every donor is exact.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_schedule

from kvweave.fuzzy.provider import Candidate
from kvweave.integrations.sglang.checks import check_stack
from kvweave.integrations.sglang.layers import inspect_layers
from kvweave.integrations.sglang.mirror import Mirror, as_tokens
from kvweave.integrations.sglang.mover import PoolMover, SlotRun
from kvweave.integrations.sglang.settings import read_settings
from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Namespace, RequestView

OPT_OUT = "kvweave_fuzzy"
"""`"custom_params": {"kvweave_fuzzy": false}` among the sampling parameters keeps one exact."""


def may_be_moved(req: Any) -> bool:
    """Whether tokens alone determine this request's KV, and it accepts approximate KV."""
    wants_prompt_logprobs = req.return_logprob and req.logprob_start_len >= 0
    more_than_tokens = (
        req.input_embeds is not None
        or req.positional_embed_overrides is not None
        or req.multimodal_inputs is not None
    )
    custom = req.sampling_params.custom_params or {}
    return not (
        wants_prompt_logprobs
        or more_than_tokens
        or req.session is not None
        or req.beam_group is not None  # SGLang does not search beams behind host hits
        or custom.get(OPT_OUT) is False
    )


def namespace_of(holder: Any) -> Namespace:
    """Of a request or a RadixKey: nothing is lent across two of these.

    SGLang's extra key holds the adapter and whatever else a client adds; its salt may be empty,
    which means none.
    """
    return Namespace("", holder.extra_key, holder.cache_salt or None)


_log = logging.getLogger(__name__)

_STALE_TRIES = 4
"""Donors that SGLang evicted unseen, before a prompt's look-up is given up."""


class _Found(NamedTuple):
    """The result of a look-up, and the inputs that it depends on."""

    exact: int
    length: int
    limit: int | None
    """Tokens of the prompt that a prefix may cover, if SGLang set one (`RadixKey.limit`)."""
    version: int
    pieces: list[Candidate]

    @property
    def served(self) -> int:
        return sum(piece.length for piece in self.pieces)


class FuzzyRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """UnifiedRadixCache whose requests may be lent moved KV right behind their exact prefix."""

    mirror: Mirror
    mover: PoolMover

    def attach(self, mirror: Mirror, mover: PoolMover, *, alone: bool = True) -> None:
        """Begin to lend; the cache is empty still. `alone`: no other rank decides alike."""
        self.mirror, self.mover, self._alone = mirror, mover, alone
        self._lends = True
        self._found: WeakKeyDictionary[Any, _Found] = WeakKeyDictionary()
        """By request: a waiting one is matched again at every step."""
        self._lent: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()
        """By request: the slots that its span was copied to, until they are in its row."""
        self.counts = dict.fromkeys(("lent", "lent_tokens", "gone", "no_room", "failed"), 0)

    # Looking up.

    def supports_fast_match_prefix(self) -> bool:
        # That makes SGLang match every waiting request at every step, whatever its policy.
        return False

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        result = super().match_prefix(params)
        req = params.req
        if req is None or not self._lends or not may_be_moved(req):
            return result
        try:
            found = self._look_up(req, params.key, result.device_prefix_len)
        except Exception:
            self._stop("looking for donors")
            return result
        if not found.pieces:
            return result
        return result._replace(
            host_hit_length=found.served,
            last_host_node=result.last_device_node,
            best_match_node=result.last_device_node,
        )

    def _look_up(self, req: Any, key: RadixKey, exact: int) -> _Found:
        known = self._found.get(req)
        length = len(key.token_ids)
        if known is not None and known[:4] == (exact, length, key.limit, self.mirror.version):
            return known
        view = RequestView(req.rid, as_tokens(key.token_ids), namespace_of(key))
        pieces: list[Candidate] = []
        for _ in range(_STALE_TRIES):
            pieces = self.mirror.find(view, exact, key.limit)
            if all(self._donor(piece, view.namespace) is not None for piece in pieces):
                break
            pieces = []
        found = _Found(exact, length, key.limit, self.mirror.version, pieces)
        self._found[req] = found
        return found

    def _donor(self, piece: Candidate, namespace: Namespace) -> Any | None:
        """The node of SGLang's tree where this donor ends; None if it is not there any more."""
        key = _key(self.mirror.path(piece), namespace)
        match = super().match_prefix(MatchPrefixParams(key=key))
        if match.device_prefix_len >= piece.donor_end:
            return match.last_device_node
        self.counts["gone"] += 1
        self.mirror.drop(piece, match.device_prefix_len)
        return None

    # Lending.

    def load_back_is_cache_owned(self) -> bool:
        return False

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any]:
        """Fill slots of the request's own with the reported span; 0 and no slots if that fails."""
        req = params.req
        found = self._found.get(req)
        nothing = 0, req.last_node
        if found is None or found.version != self.mirror.version:
            return nothing  # its donors may have other names by now
        if (req.prefix_len, params.host_hit_length) != (found.exact, found.served):
            return nothing
        slots = self._filled(found, namespace_of(req))
        if slots is None:
            self._found[req] = found._replace(pieces=[])  # until something else is to be found
            return nothing
        self._lent[req] = slots
        req.skip_radix_cache_insert = True
        for piece in found.pieces:
            self.mirror.use(piece)
        self.counts["lent"] += 1
        self.counts["lent_tokens"] += len(slots)
        _log.debug("%s: %d tokens moved behind %d exact", req.rid, len(slots), found.exact)
        return len(slots), req.last_node

    def _filled(self, found: _Found, namespace: Namespace) -> torch.Tensor | None:
        locks = []
        try:
            sources = []
            for piece in found.pieces:
                node = self._donor(piece, namespace)
                if node is None:
                    return None
                locks.append(self.lock(node))
                path = self.path_device_indices(node)
                sources.append(path[piece.donor_start : piece.donor_end])
            slots = self._room(found.served)
            if slots is None:
                self.counts["no_room"] += 1
            elif not self._moved(_runs(found.pieces, sources, slots)):
                self.token_to_kv_pool_allocator.free(slots)
                slots = None
            return slots
        finally:
            for lock in locks:
                self.unlock(lock)

    def _moved(self, runs: Sequence[SlotRun]) -> bool:
        try:
            self.mover.move(runs)
        except Exception:
            if not self._alone:
                raise  # other ranks have moved theirs, and would go on without this one
            self.counts["failed"] += 1
            if self.counts["failed"] == 1:
                _log.exception("moving KV failed; requests go on with their exact prefix")
            return False
        return True

    def _room(self, tokens: int) -> torch.Tensor | None:
        """Slots for that many tokens; evicts unlocked nodes if needed."""
        allocator = self.token_to_kv_pool_allocator
        short = tokens - allocator.available_size()
        if short > 0:
            self.evict(EvictParams(num_tokens=short))
        slots: torch.Tensor | None = allocator.alloc(tokens)
        return slots

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        slots = self._lent.get(req)
        if slots is not None:
            exact = self.path_device_indices(req.last_node)[: req.prefix_len - len(slots)]
            return torch.cat([exact, slots])
        only_exact: torch.Tensor = super().prefix_device_indices(req)
        return only_exact

    # Keeping the mirror.

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint(req, up_to=up_to, **kwargs)
        if not self._lends:
            return
        kept = as_tokens(req.full_untruncated_fill_ids[: req.kv.cache_protected_len])
        try:
            self.mirror.add(req.rid, namespace_of(req), kept)
        except Exception:
            self._stop("noting what is cached")

    def _stop(self, doing: str) -> None:
        """A fault of ours: from now on, a plain cache. The same happens on every rank."""
        self._lends = False
        _log.exception("kvweave failed at %s, and moves no KV until the next start", doing)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self._lent.pop(req, None)
        self._found.pop(req, None)

    def reset(self) -> None:
        super().reset()
        if hasattr(self, "mirror"):  # the base class's constructor begins with a reset
            self.mirror.clear()
            self._found.clear()
            self._lent.clear()


def _key(tokens: IntArray, namespace: Namespace) -> RadixKey:
    ids = array("q")
    ids.frombytes(tokens.astype(np.int64).tobytes())
    return RadixKey(ids, extra_key=namespace.adapter, cache_salt=namespace.salt)


def _runs(
    pieces: Sequence[Candidate], sources: Sequence[torch.Tensor], slots: torch.Tensor
) -> list[SlotRun]:
    targets = torch.split(slots, [piece.length for piece in pieces])
    return [
        SlotRun(source, target, piece.start - piece.donor_start)
        for piece, source, target in zip(pieces, sources, targets, strict=True)
    ]


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
