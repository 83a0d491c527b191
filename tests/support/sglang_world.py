"""A scheduler in miniature around the plug-in's cache, on the fake of SGLang.

Keys say which token they belong to and are turned to their position; values say the token. So for
every position of a served request it can be told whether what lies in its slot belongs there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import support.fake_sglang as fake
from kvweave.integrations.sglang.checks import PluginConfig
from kvweave.kv.layout import Rotary

SMALL = PluginConfig(
    stride=4,
    min_span=8,
    min_suffix=2,
    sink_tokens=2,
    min_reuse_ratio=0.0,
    refresh_tokens=0,
    min_chunk_span=8,
)
_LAYERS, _HEADS, _DIM = 2, 2, 8
_ROTARY = Rotary(1.0 / 100.0 ** (np.arange(_DIM // 2) / (_DIM // 2)))
_EMBEDDING = fake.RotaryEmbedding(_DIM, base=100)
_CODES = torch.randn(512, _HEADS, _DIM, generator=torch.Generator().manual_seed(1))


class Server:
    """One rank: a pool, a cache, and requests that run one step at a time."""

    def __init__(
        self,
        slots: int = 512,
        page_size: int = 1,
        config: PluginConfig = SMALL,
        alone: bool = True,
        chunk: int | None = 4096,
    ) -> None:
        """`chunk`: most tokens that a step computes of a prompt; None: no hooks, and all of it."""
        from kvweave.integrations.sglang import register_hooks
        from kvweave.integrations.sglang.cache import FuzzyRadixCache
        from kvweave.integrations.sglang.layers import KeyRotation, PoolMover, RotaryTable
        from kvweave.integrations.sglang.mirror import Mirror

        register_hooks()
        self._chunk = chunk or 10**9
        self.page_size = page_size
        self.pool = fake.MHATokenToKVPool(slots, page_size, _LAYERS, _HEADS, _DIM)
        self.allocator = fake.Allocator(slots, page_size, self.pool)
        rotations = [KeyRotation(_ROTARY, RotaryTable(_EMBEDDING, backwards=False))] * _LAYERS
        self.cache = FuzzyRadixCache(fake.CacheInitParams(self.allocator, page_size))
        self.mover = PoolMover(self.pool, rotations, None)
        mirror = Mirror(page_size, slots // page_size, config)
        self.cache.attach(mirror, self.mover, config, alone=alone, chunked=chunk is not None)

    def match(self, req: fake.Req) -> int:
        """As a waiting request is matched; the host hit that it is promised."""
        ids = req.full_untruncated_fill_ids
        key = fake.RadixKey(ids, req.extra_key, len(ids) - 1, req.cache_salt)
        result = self.cache.match_prefix(fake.MatchPrefixParams(key, req))
        req.prefix_len, req.last_node = result.device_prefix_len, result.last_device_node
        req.host_hit_length = result.host_hit_length
        req.kv.cache_protected_len = req.prefix_len
        return result.host_hit_length

    def load(self, req: fake.Req) -> int:
        """As an admitted request is loaded: tokens that it was lent."""
        if not req.host_hit_length:
            return 0
        params = fake.InitLoadBackParams(req.last_node, req.host_hit_length, req)
        loaded, req.last_node = self.cache.init_load_back(params)
        assert loaded in (0, req.host_hit_length), "SGLang takes all or nothing"
        req.prefix_len += loaded
        return loaded

    def prefill(self, req: fake.Req) -> int:
        """Admit a request and compute its prompt, chunk by chunk; tokens that it was lent."""
        before = self.cache.counts["lent_tokens"]
        more = self.admit(req)
        while more:
            more = self.go_on(req)
        return int(self.cache.counts["lent_tokens"] - before)

    def admit(self, req: fake.Req) -> bool:
        """Admit a request and compute its first chunk; whether there are more."""
        self.match(req)
        req.lock = self.cache.lock(req.last_node)
        adder: Any = fake.PrefillAdder(self.cache, self._chunk)
        asked = {"host_hit_length": req.host_hit_length, "has_chunked_req": False}
        admission = adder._select_prefill_admission(req, **asked)
        if not self.load(req) and req.host_hit_length:
            asked["host_hit_length"] = 0
            admission = adder._select_prefill_admission(req, **asked)
        req.row = self.cache.prefix_device_indices(req)
        assert len(req.row) == req.prefix_len
        req.kv.req_pool_idx = id(req)
        self.cache.req_to_token_pool.holders[id(req)] = req
        req.extend_end = admission.extend_end
        self._extend(req)
        return bool(admission.is_chunked)

    def go_on(self, req: fake.Req) -> bool:
        """Compute the next chunk; whether there are more."""
        adder: Any = fake.PrefillAdder(self.cache, self._chunk)
        more = adder.add_chunked_req(req) is not None
        self._extend(req)
        return more

    def _extend(self, req: fake.Req) -> None:
        fresh = self._room(req.extend_end - req.prefix_len)
        req.row = torch.cat([req.row, fresh])
        self._compute(req, req.prefix_len, req.extend_end)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end
        self._checkpoint(req, req.extend_end)
        req.prefix_len = req.extend_end

    def decode(self, req: fake.Req, token: int) -> None:
        """Append one token."""
        ids = req.full_untruncated_fill_ids
        ids.append(token)
        if len(ids) > len(req.row):
            req.row = torch.cat([req.row, self._room(1)])
        self._compute(req, len(ids) - 1, len(ids))

    def release(self, req: fake.Req, *, finished: bool = True) -> None:
        """The request ends, or is retracted: its slots go back."""
        if finished:
            self._checkpoint(req, len(req.full_untruncated_fill_ids))
        owned = req.row[req.kv.cache_protected_len :]
        if len(owned):
            self.allocator.free(owned)
        self.cache.unlock(req.lock)
        self.cache.on_release(req, checkpointed=finished)
        self.cache.req_to_token_pool.holders.pop(req.kv.req_pool_idx, None)
        req.lock, req.kv = None, fake.ReqKvInfo()

    def run(self, tokens: Sequence[int], output: Sequence[int] = (), **about: Any) -> int:
        """A whole request; tokens that it was lent."""
        req = fake.Req("r", tokens, **about)
        lent = self.prefill(req)
        for token in output:
            self.decode(req, token)
        self.check([req])
        self.release(req)
        self.check([])
        return lent

    def check(self, running: Sequence[fake.Req]) -> None:
        """Every slot is free, in the tree or in a running request's row; rows hold their own."""
        nodes = self.cache.nodes()
        tree = torch.cat([node.slots for node in nodes]).tolist()
        rows = [at for req in running for at in req.row[req.kv.cache_protected_len :].tolist()]
        free = self.allocator.available_size()
        assert len(set(tree)) == len(tree)
        assert not set(tree) & set(rows)
        assert free + len(tree) + len(rows) == self.allocator.size, "slots leaked"
        for req in running:
            self._check_row(req)
        self.cache.mirror.check()

    def _check_row(self, req: fake.Req) -> None:
        ids = req.full_untruncated_fill_ids
        done = min(len(ids), len(req.row))
        ids, slots = ids[:done], req.row[:done]
        for layer in range(_LAYERS):
            keys, values = self.pool.k_buffer[layer][slots], self.pool.v_buffer[layer][slots]
            torch.testing.assert_close(values, _CODES[list(ids)])
            torch.testing.assert_close(keys, _keys(ids, 0), atol=2e-6, rtol=2e-6)

    def _compute(self, req: fake.Req, begin: int, end: int) -> None:
        ids = req.full_untruncated_fill_ids[begin:end]
        slots = req.row[begin : begin + len(ids)]
        for layer in range(_LAYERS):
            self.pool.k_buffer[layer][slots] = _keys(ids, begin)
            self.pool.v_buffer[layer][slots] = _CODES[list(ids)]

    def _checkpoint(self, req: fake.Req, up_to: int) -> None:
        if not req.skip_radix_cache_insert:
            self.cache.checkpoint(req, up_to=up_to)

    def _room(self, tokens: int) -> torch.Tensor:
        need = -(-tokens // self.page_size) * self.page_size
        short = need - self.allocator.available_size()
        if short > 0:
            self.cache.evict(fake.EvictParams(short))
        slots = self.allocator.alloc(need)
        assert slots is not None, "the test's pool is too small"
        return slots


def _keys(ids: array[int], start: int) -> torch.Tensor:
    return _EMBEDDING(torch.arange(start, start + len(ids)), _CODES[list(ids)])
