"""What the plug-in asks of the SGLang that it is loaded into, checked before anything is served.

Where moved KV does not fit (or was never tried), a server that starts and is quietly wrong is the
worst that could happen. So each such thing is refused at start, all of them at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvweave.errors import UnsupportedModelError
from kvweave.integrations.sglang import BACKEND
from kvweave.integrations.sglang.contract import VERSION, differences


class _Flag(NamedTuple):
    name: str
    harmless: tuple[Any, ...]
    why: str


_OTHER_TREE = "it brings a cache of its own"
_UNTRIED = "the plug-in has not been tried with it"

_FLAGS = (
    _Flag("speculative_algorithm", (None,), "its draft model keeps KV that is not moved along"),
    _Flag("enable_deterministic_inference", (False,), "moved KV is approximate"),
    _Flag("enable_hierarchical_cache", (False,), "moved spans come in where its host hits do"),
    _Flag("enable_lmcache", (False,), _OTHER_TREE),
    _Flag("enable_flexkv", (False,), _OTHER_TREE),
    _Flag("enable_unified_cache_external_linker", (False,), _OTHER_TREE),
    _Flag("enable_unified_memory", (False,), "slots of its pool change their places"),
    _Flag("enable_hisparse", (False,), "it keeps KV in layouts of its own"),
    _Flag("enable_streaming_session", (False,), "its sessions keep KV outside the tree"),
    _Flag("enable_session_radix_cache", (False,), _UNTRIED),
    _Flag("dllm_algorithm", (None,), "diffusion models attend to later tokens"),
    _Flag("kv_canary", ("none",), "it would take moved KV for damage"),
    _Flag("enable_pdmux", (False,), "it computes prompts on streams of their own"),
    _Flag("disaggregation_mode", ("null",), _UNTRIED),
    _Flag("pp_size", (1,), _UNTRIED),
    _Flag("dcp_size", (1,), "it spreads a prompt's KV over ranks"),
    _Flag("attn_cp_size", (1,), "it spreads a prompt's KV over ranks"),
)


def check_stack(context: Any) -> None:
    """Raise UnsupportedModelError naming all that is refused about a TreeCacheBuildContext."""
    found = [f"it is not the SGLang {VERSION} that it is written for: {at}" for at in differences()]
    if not found:  # else nothing further can be asked
        found = [*_in_flags(context), *_in_model(context), *_in_pool(context)]
    if found:
        raise UnsupportedModelError(
            f"--radix-cache-backend {BACKEND} does not work with this server: " + "; ".join(found)
        )


def _in_flags(context: Any) -> list[str]:
    found = []
    if context.disable_radix_cache:
        found.append("--disable-radix-cache leaves nothing to take spans from")
    for name, harmless, why in _FLAGS:
        value = getattr(context.server_args, name)
        if value not in harmless:
            shown = "" if value is True else f" {value}"
            found.append(f"--{name.replace('_', '-')}{shown} cannot be combined with it: {why}")
    return found


def _in_model(context: Any) -> list[str]:
    found = []
    if context.is_hybrid_swa:
        found.append("the model's sliding-window layers drop KV that a moved span would need")
    if context.is_hybrid_ssm:
        found.append("the model has recurrent state, which cannot be moved")
    if context.model_config.is_multimodal:
        found.append("the model takes images or sound, whose positions are not those of text")
    return found


def _in_pool(context: Any) -> list[str]:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = context.params.token_to_kv_pool_allocator.get_kvcache()
    if type(pool) is not MHATokenToKVPool:
        return [
            f"its KV lies in a {type(pool).__name__}, and only the plain layout of multi-head "
            "attention can be moved (no MLA, no quantised KV, no sparse attention)"
        ]
    found = []
    if pool.kv_cache_layout != "nhd" or pool.get_key_buffer(pool.start_layer).dim() != 3:
        found.append(
            f"its KV pool has the layout {pool.kv_cache_layout!r}, not slots x heads x dim"
        )
    if pool.store_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        found.append(
            f"its KV is kept as {pool.store_dtype}, which cannot be turned; leave out "
            "--kv-cache-dtype"
        )
    return found
