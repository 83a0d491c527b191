"""SGLang's radix cache with moved runs, and its factory.

A run directly behind the exact prefix uses SGLang's path for KV that is not on the device yet:
`match_prefix` reports it as a host hit, admission calls `init_load_back`, and that fills slots that
belong to the request. Later runs are lent between prefill chunks, by the hooks in the package.

Approximate KV never spreads: a request that was lent a run inserts nothing from then on
(`skip_radix_cache_insert`), and its slots are freed with it. So every donor is exact.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

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
from sglang.srt.runtime_context import get_schedule, get_serving

from kvweave.fuzzy.provider import Candidate
from kvweave.integrations.sglang.checks import (
    PluginConfig,
    check_stack,
    read_settings,
    without_chunks,
)
from kvweave.integrations.sglang.layers import PoolMover, SlotRun, inspect_layers
from kvweave.integrations.sglang.mirror import Mirror, as_tokens
from kvweave.integrations.sglang.runs import Counts, Run, runs_of
from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Namespace, RequestView

_log = logging.getLogger(__name__)

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


_STALE_TRIES = 4
"""Look-ups of one prompt that find donors which SGLang has evicted, before it gets no runs."""


class _Found(NamedTuple):
    """The result of a look-up, and the inputs that it depends on."""

    exact: int
    length: int
    limit: int | None
    """Tokens of the prompt that a prefix may cover, if SGLang set one (`RadixKey.limit`)."""
    version: int
    runs: list[Run]

    @property
    def front(self) -> Run | None:
        """The run directly behind the exact prefix."""
        return self.runs[0] if self.runs and self.runs[0].start == self.exact else None


class Loan(NamedTuple):
    """A run, with the tokens of its donors' prompts up to where each piece ends there.

    It stays valid whatever is published or evicted meanwhile.
    """

    run: Run
    paths: tuple[IntArray, ...]

    def donors(self) -> Iterator[tuple[Candidate, IntArray]]:
        """Its pieces, each with its path."""
        return zip(self.run.pieces, self.paths, strict=True)


class FuzzyRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """UnifiedRadixCache whose requests may be lent moved KV, with their prefix and between chunks.

    mirror: what can be found; mover: copies KV; counts: what was lent, and why some was not.
    """

    mirror: Mirror
    mover: PoolMover

    def attach(
        self,
        mirror: Mirror,
        mover: PoolMover,
        config: PluginConfig,
        *,
        alone: bool = True,
        chunked: bool = True,
    ) -> None:
        """Begin to lend. The cache must be empty.

        `alone`: there are no other ranks. `chunked`: chunks may be ended for runs.
        """
        self.mirror, self.mover, self._config = mirror, mover, config
        self.alone, self.chunked = alone, chunked
        self.lends = True
        """False after a fault of the plug-in."""
        self._found: WeakKeyDictionary[Any, _Found] = WeakKeyDictionary()
        """By request: a waiting one is matched again at every step."""
        self._lent: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()
        """By request: the slots of its host hit, until they are in its row."""
        self._served: WeakSet[Any] = WeakSet()
        """Requests that were lent something, and therefore insert nothing."""
        self.loans: WeakKeyDictionary[Any, deque[Loan]] = WeakKeyDictionary()
        """By request that is computed in chunks: the runs to come, first one first."""
        self.counts = Counts()

    # Looking up.

    def supports_fast_match_prefix(self) -> bool:
        # That makes SGLang match every waiting request at every step, whatever its policy.
        return False

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        result = super().match_prefix(params)
        req = params.req
        if req is None or not self.lends or not may_be_moved(req):
            return result
        try:
            found = self._look_up(req, params.key, result.device_prefix_len)
        except Exception:
            self.stop("looking for donors")
            return result
        if found.front is None:
            return result
        return result._replace(
            host_hit_length=found.front.length,
            last_host_node=result.last_device_node,
            best_match_node=result.last_device_node,
        )

    def _look_up(self, req: Any, key: RadixKey, exact: int) -> _Found:
        known = self._found.get(req)
        length = len(key.token_ids)
        if known is not None and known[:4] == (exact, length, key.limit, self.mirror.version):
            return known
        view = RequestView(req.rid, as_tokens(key.token_ids), namespace_of(key))
        runs: list[Run] = []
        for _ in range(_STALE_TRIES):
            runs = runs_of(
                self.mirror.find(view, exact),
                exact=exact,
                length=length,
                limit=key.limit,
                page_size=self.page_size,
                config=self._config,
                chunked=self.chunked,
            )
            if all(self._is_there(run, view.namespace) for run in runs):
                break
            runs = []
        found = _Found(exact, length, key.limit, self.mirror.version, runs)
        self._found[req] = found
        return found

    def _is_there(self, run: Run, namespace: Namespace) -> bool:
        """Whether SGLang's tree has all of the run's donors; the mirror forgets those that went."""
        return all(
            self._donor(piece, path, namespace) is not None
            for piece, path in self._loan(run).donors()
        )

    def _loan(self, run: Run) -> Loan:
        """`run`, which was found in the mirror as it is now."""
        return Loan(run, tuple(self.mirror.path(piece) for piece in run.pieces))

    def _donor(self, piece: Candidate, path: IntArray, namespace: Namespace) -> Any | None:
        """The node of SGLang's tree where this donor ends; None if it is not there any more."""
        match = super().match_prefix(MatchPrefixParams(key=_key(path, namespace)))
        if match.device_prefix_len >= piece.donor_end:
            return match.last_device_node
        self.counts.add("gone")
        self.mirror.drop(namespace, path, match.device_prefix_len)
        return None

    def loans_behind(self, req: Any, position: int) -> list[Loan]:
        """The runs to come behind `position`, of a request that is about to be admitted."""
        found = self._found.get(req)
        if found is None or found.version != self.mirror.version:  # a donor just went
            return [loan for loan in self.loans.get(req, ()) if loan.run.start > position]
        return [self._loan(run) for run in found.runs if run.start > position]

    # Lending.

    def load_back_is_cache_owned(self) -> bool:
        return False

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any]:
        """Fill slots of the request's own with the reported run; 0 and no slots if that fails."""
        req = params.req
        found = self._found.get(req)
        nothing = 0, req.last_node
        if found is None or found.front is None or found.version != self.mirror.version:
            return nothing  # the pages that it names may hold other text by now
        if (req.prefix_len, params.host_hit_length) != (found.exact, found.front.length):
            return nothing
        try:
            slots = self.filled(req, self._loan(found.front))
        except Exception:
            self.fault("lending")
            slots = None
        if slots is None:
            # Not tried again until the mirror changes. The runs behind it may still be lent.
            self._found[req] = found._replace(runs=found.runs[1:])
            return nothing
        self._lent[req] = slots
        self.lent(req, found.front)
        return len(slots), req.last_node

    def lent(self, req: Any, run: Run) -> None:
        """The request has slots with this run: nothing of it is inserted from now on."""
        if req not in self._served:
            self._served.add(req)
            self.counts.add("lent_requests")
            req.skip_radix_cache_insert = True
        self.counts.add("lent_runs")
        self.counts.add("lent_tokens", run.length)
        _log.debug("%s: positions %d to %d lent", req.rid, run.start, run.end)

    def filled(self, req: Any, loan: Loan) -> torch.Tensor | None:
        """New slots that hold the run; None, and no slots, if a donor, room or the copy fails."""
        namespace, locks = namespace_of(req), []
        try:
            sources = []
            for piece, path in loan.donors():
                node = self._donor(piece, path, namespace)
                if node is None:
                    return None
                locks.append(self.lock(node))
                held = self.path_device_indices(node)
                sources.append(held[piece.donor_start : piece.donor_end])
            for path in loan.paths:
                self.mirror.use(namespace, path)
            slots = self._room(loan.run.length)
            if slots is None:
                self.counts.add("no_room")
            elif not self._moved(loan.run.pieces, sources, slots):
                self.token_to_kv_pool_allocator.free(slots)
                slots = None
            return slots
        finally:
            for lock in locks:
                self.unlock(lock)

    def _moved(
        self, pieces: Sequence[Candidate], sources: Sequence[torch.Tensor], slots: torch.Tensor
    ) -> bool:
        try:
            self.mover.move(_slot_runs(pieces, sources, slots))
        except Exception:
            if not self.alone:
                raise  # other ranks have moved theirs, and would go on without this one
            self.counts.add("failed")
            if self.counts["failed"] == 1:
                _log.exception("moving KV failed; requests go on with what is exact")
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
        if not self.lends:
            return
        kept = as_tokens(req.full_untruncated_fill_ids[: req.kv.cache_protected_len])
        try:
            self.mirror.add(req.rid, namespace_of(req), kept)
        except Exception:
            self.stop("noting what is cached")

    def fault(self, doing: str) -> None:
        """Handle the current exception, which other ranks may not have met.

        They have lent the run then and must not go on without this rank, so it stops: the exception
        is raised again. Without other ranks, only lending stops.
        """
        if not self.alone:
            raise
        self.stop(doing)

    def stop(self, doing: str) -> None:
        """Log the current exception, which every rank meets, and be a plain cache from now on."""
        self.lends = False
        _log.exception("kvweave failed at %s, and moves no KV until the next start", doing)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        for kept in (self._lent, self._found, self.loans):
            kept.pop(req, None)
        if req in self._served:  # a retracted request comes back, and may be computed exactly
            self._served.discard(req)
            req.skip_radix_cache_insert = False

    def reset(self) -> None:
        super().reset()
        if hasattr(self, "mirror"):  # the base class's constructor begins with a reset
            self.mirror.clear()
            for kept in (self._lent, self._found, self.loans, self._served):
                kept.clear()

    def state(self) -> dict[str, Any]:
        """What /server_info shows."""
        return {
            "lends": self.lends,
            "between_chunks": self.chunked,
            **self.counts.as_dict(),
            "index": self.mirror.stats(),
        }


def _key(tokens: IntArray, namespace: Namespace) -> RadixKey:
    ids = array("q")
    ids.frombytes(tokens.astype(np.int64).tobytes())
    return RadixKey(ids, extra_key=namespace.adapter, cache_salt=namespace.salt)


def _slot_runs(
    pieces: Sequence[Candidate], sources: Sequence[torch.Tensor], slots: torch.Tensor
) -> list[SlotRun]:
    targets = torch.split(slots, [piece.length for piece in pieces])
    return [
        SlotRun(source, target, piece.donor_start, piece.start)
        for piece, source, target in zip(pieces, sources, targets, strict=True)
    ]


def build_cache(context: Any) -> FuzzyRadixCache:
    """See `kvweave.integrations.sglang.build`."""
    config = read_settings()
    check_stack(context)
    why_not = without_chunks()
    for reason in why_not:
        _log.warning(
            "kvweave moves text only directly behind a cached prefix, one run per prompt: %s",
            reason,
        )
    runner, allocator = context.tp_worker.model_runner, context.params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    rotations = inspect_layers(
        runner.model,
        range(pool.start_layer, pool.start_layer + pool.layer_num),
        hidden_size=context.model_config.hidden_size,
        context_length=context.model_config.context_len,
        dtype=context.model_config.dtype,
        device=torch.device(pool.device),
    )
    overlapped = not get_schedule().disable_overlap_schedule
    mover = PoolMover(pool, rotations, runner.forward_stream if overlapped else None)
    size = context.params.page_size
    mirror = Mirror(size, max(1, allocator.size // size), config)
    cache: FuzzyRadixCache = create_unified_radix_cache(context, cache_class=FuzzyRadixCache)
    cache.attach(mirror, mover, config, alone=context.tp_size == 1, chunked=not why_not)
    if context.params.enable_metrics and context.tp_rank == 0:
        cache.counts.export(get_serving().served_model_name)
    _log.info("kvweave lends moved KV: %s", config)
    return cache
