"""The part of SGLang that the plug-in touches, small and in memory, under SGLang's own names.

`test_sglang_contract.py` holds it to the list of what the plug-in uses, and, where SGLang is
installed, holds SGLang to the same list.
"""

from __future__ import annotations

import functools
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from support.fake_tree import (  # noqa: F401  (Allocator is for tests)
    Allocator,
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
    RadixKey,
    ReqToTokenPool,
    UnifiedRadixCache,
)


class MHATokenToKVPool:
    """Keys and values of every slot, layer by layer."""

    def __init__(self, size: int, page_size: int, layers: int, heads: int, dim: int) -> None:
        self.device, self.start_layer, self.layer_num = "cpu", 0, layers
        self.kv_cache_layout, self.store_dtype = "nhd", torch.float32
        shape = (size + page_size, heads, dim)
        self.k_buffer = [torch.zeros(shape) for _ in range(layers)]
        self.v_buffer = [torch.zeros(shape) for _ in range(layers)]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v_buffer[layer_id]


@dataclass
class CacheInitParams:
    token_to_kv_pool_allocator: Any
    page_size: int
    enable_metrics: bool = False


@dataclass
class TreeCacheBuildContext:
    server_args: Any
    params: CacheInitParams
    tp_worker: Any
    model_config: Any
    is_hybrid_swa: bool = False
    is_hybrid_ssm: bool = False
    disable_radix_cache: bool = False
    tp_size: int = 1
    tp_rank: int = 0


_registered: dict[str, Any] = {}


def register_radix_cache_backend(name: str, factory: Any) -> None:
    if name in _registered:
        raise ValueError(f"{name} is already registered")
    _registered[name] = factory


def get_radix_cache_factory(name: str) -> Any:
    return _registered.get(name)


def create_unified_radix_cache(ctx: Any, *, cache_class: Any = None) -> Any:
    return (cache_class or UnifiedRadixCache)(ctx.params)


class RadixAttention(torch.nn.Module):
    def __init__(self, layer_id: int, heads: int, dim: int) -> None:
        super().__init__()
        self.layer_id, self.tp_k_head_num = layer_id, heads
        self.qk_head_dim = self.v_head_dim = dim

    def forward(
        self, q: Any, k: Any, v: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Any:
        raise AssertionError("nothing attends when a layer is run alone")


class RotaryEmbedding(torch.nn.Module):
    """Turns keys by a float32 table of cosines and sines; halves or interleaved pairs."""

    def __init__(
        self, dim: int, *, base: int = 10_000, halves: bool = True, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.dim, self.base, self.halves, self.scale = dim, base, halves, scale
        self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache(), persistent=False)

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        frequencies = 1 / self.base ** (torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.arange(4096)[:, None] * frequencies
        return torch.cat([angles.cos(), angles.sin()], -1) * self.scale

    def forward_native(self, positions: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        rows = self.cos_sin_cache.index_select(0, self.row_of(positions))
        cosine, sine = rows[:, None].to(key.dtype).chunk(2, -1)
        turned, rest = key[..., : self.dim], key[..., self.dim :]
        if self.halves:
            a, b = turned.chunk(2, -1)
            return torch.cat([a * cosine - b * sine, b * cosine + a * sine, rest], -1)
        a, b = turned[..., ::2], turned[..., 1::2]
        pairs = torch.stack([a * cosine - b * sine, b * cosine + a * sine], -1)
        return torch.cat([pairs.flatten(-2), rest], -1)

    forward = forward_native

    def row_of(self, positions: torch.Tensor) -> torch.Tensor:
        return positions


class ForwardMode(Enum):
    EXTEND = 1
    DECODE = 2


def get_schedule() -> Any:
    return SimpleNamespace(disable_overlap_schedule=True, chunked_prefill_size=4096)


def get_serving() -> Any:
    return SimpleNamespace(served_model_name="some-model")


class SamplingParams:
    def __init__(self, custom_params: dict[str, Any] | None = None) -> None:
        self.custom_params = custom_params


@dataclass
class ReqKvInfo:
    req_pool_idx: int | None = None
    cache_protected_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0


class Req:
    """A request, with what a scheduler keeps for it."""

    def __init__(
        self,
        rid: str,
        tokens: Any = (),
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        sampling_params: SamplingParams | None = None,
        return_logprob: bool = False,
        input_embeds: Any = None,
        positional_embed_overrides: Any = None,
        session: Any = None,
        beam_group: Any = None,
    ) -> None:
        self.rid, self.extra_key, self.cache_salt = rid, extra_key, cache_salt
        self.full_untruncated_fill_ids = array("q", tokens)
        self.sampling_params = sampling_params or SamplingParams()
        self.return_logprob, self.logprob_start_len = return_logprob, -1
        self.input_embeds, self.session = input_embeds, session
        self.positional_embed_overrides = positional_embed_overrides
        self.beam_group = beam_group
        self.multimodal_inputs = None
        self.skip_radix_cache_insert = False
        self.prefix_len, self.host_hit_length = 0, 0
        self.last_node: Any = None
        self.lock: Any = None
        self.kv = ReqKvInfo()
        self.row = torch.zeros(0, dtype=torch.int64)
        self.extend_end = 0
        self.retracted_stain, self.cached_tokens_host = False, 0


class AddReqResult(Enum):
    CONTINUE = 1
    OTHER = 2


@dataclass
class PrefillAdmission:
    extend_end: int
    is_chunked: bool


class PrefillAdder:
    """How much of which request the next batch computes: at most `chunk` tokens."""

    def __init__(self, tree_cache: Any, chunk: int) -> None:
        self.tree_cache, self.page_size = tree_cache, tree_cache.page_size
        self.rem_chunk_tokens = chunk
        self.chunked_req_limit: int | None = None
        self.new_chunked_req: Any = None
        self.log_hit_tokens = self.log_host_hit_tokens = self.reprocessed_log_hit_tokens = 0

    @property
    def rem_total_tokens(self) -> int:
        free: int = self.tree_cache.token_to_kv_pool_allocator.available_size()
        return free + int(self.tree_cache.evictable_size())

    def _select_prefill_admission(
        self, req: Any, *, host_hit_length: int, has_chunked_req: bool
    ) -> Any:
        begin, end = req.prefix_len + host_hit_length, len(req.full_untruncated_fill_ids)
        if end - begin <= self.rem_chunk_tokens:
            return PrefillAdmission(end, False)
        return PrefillAdmission(begin + self.rem_chunk_tokens, True)

    def add_chunked_req(self, req: Any) -> Any:
        limits = [at for at in (self.rem_chunk_tokens, self.chunked_req_limit) if at is not None]
        assert min(limits) > 0
        end = len(req.full_untruncated_fill_ids)
        req.extend_end = min(end, req.prefix_len + min(limits))
        return req if req.extend_end < end else None


class HookType(Enum):
    AROUND = 1
    AFTER = 2


class HookRegistry:
    """Applies at once what SGLang applies when all plug-ins are loaded."""

    _plain: dict[tuple[Any, str], Any] = {}

    @classmethod
    def reset(cls) -> None:
        for (owner, name), original in cls._plain.items():
            setattr(owner, name, original)

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
        owner, name = globals().get(target.split(".")[-2]), target.split(".")[-1]
        if owner is None:
            return  # nothing here calls it
        original = cls._plain.setdefault((owner, name), getattr(owner, name))

        @functools.wraps(original)
        def wrapped(*given: Any, **named: Any) -> Any:
            assert hook_type is HookType.AROUND
            return hook(original, *given, **named)

        setattr(owner, name, wrapped)


_MODULES = {
    "mem_cache.registry": (
        TreeCacheBuildContext,
        create_unified_radix_cache,
        get_radix_cache_factory,
        register_radix_cache_backend,
    ),
    "mem_cache.cache_init_params": (CacheInitParams,),
    "mem_cache.base_prefix_cache": (
        MatchPrefixParams,
        MatchResult,
        EvictParams,
        InitLoadBackParams,
    ),
    "mem_cache.radix_cache": (RadixKey,),
    "mem_cache.unified_radix_cache": (UnifiedRadixCache,),
    "mem_cache.memory_pool": (MHATokenToKVPool, ReqToTokenPool),
    "layers.radix_attention": (RadixAttention,),
    "layers.rotary_embedding.base": (RotaryEmbedding,),
    "model_executor.forward_batch_info": (ForwardMode,),
    "managers.schedule_batch": (Req, ReqKvInfo),
    "managers.schedule_policy": (AddReqResult, PrefillAdder),
    "plugins.hook_registry": (HookRegistry, HookType),
    "sampling.sampling_params": (SamplingParams,),
    "runtime_context": (get_schedule, get_serving),
}


@contextmanager
def installed() -> Iterator[None]:
    """Within, `sglang` is the fake, and the plug-in is imported anew against it."""
    put = {name for name in sys.modules if name.partition(".")[0] == "sglang"}
    kept = {name: sys.modules.pop(name) for name in [*put, *_plugin_modules()]}
    _registered.clear()
    HookRegistry.reset()
    for name, things in _MODULES.items():
        path = f"sglang.srt.{name}"
        ends = [at for at, character in enumerate(path) if character == "."]
        for end in ends:
            sys.modules.setdefault(path[:end], ModuleType(path[:end]))
        module = sys.modules[path] = ModuleType(path)
        for thing in things:
            setattr(module, thing.__name__, thing)
    try:
        yield
    finally:
        for name in [at for at in sys.modules if at.partition(".")[0] == "sglang"]:
            del sys.modules[name]
        for name in _plugin_modules():
            del sys.modules[name]
        sys.modules.update(kept)


def find(name: str) -> Any:
    """What the fake has under a name of the plug-in's contract."""
    module, _, path = name.partition(":")
    things = {thing.__name__: thing for thing in _MODULES[module.removeprefix("sglang.srt.")]}
    first, *rest = path.split(".")
    found = things[first]
    for part in rest:
        found = getattr(found, part)
    return found


def _plugin_modules() -> list[str]:
    return [name for name in sys.modules if name.startswith("kvweave.integrations.sglang")]
