"""Checks at start: the plug-in's settings, the parts of SGLang that it uses, flags that it refuses.

`KVWEAVE_FUZZY_MIN_SPAN=64` sets what `--fuzzy-min-span 64` sets in kvweave's own engine, and so on
for every name in `NAMES`. `KVWEAVE_SGLANG_CONFIG` names a JSON file with the same settings under
their short names, `{"min_span": 64}`; the environment wins over the file.

SGLang's caches are no public interface: names and parameters move between its releases. What is
listed here was read in 0.5.23. A server whose SGLang differs is refused at start with the list of
differences; nothing is served on a guess.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch

from kvweave.config import FuzzyConfig
from kvweave.config.base import flag, flag_name, read
from kvweave.errors import ConfigError, UnsupportedModelError, reason
from kvweave.integrations import BACKEND


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig(FuzzyConfig):
    """The settings of the plug-in: some of the engine's own, and one that only SGLang needs."""

    min_chunk_span: int = flag(64, "Shortest run of tokens that a prefill chunk is ended for.")

    def problems(self) -> list[str]:
        found = FuzzyConfig.problems(self)
        if self.min_chunk_span < 1:
            name = flag_name(self, "min_chunk_span")
            found.append(f"{name} must be 1 or more, not {self.min_chunk_span}")
        return found


NAMES = (
    "min_span",
    "min_suffix",
    "min_reuse_ratio",
    "sink_tokens",
    "stride",
    "max_share",
    "refresh_tokens",
    "min_chunk_span",
)
"""What can be set. PluginConfig's other settings have no place in SGLang's interface."""

FILE = "KVWEAVE_SGLANG_CONFIG"
_PREFIX = "KVWEAVE_FUZZY_"


def read_settings(environment: Mapping[str, str] | None = None) -> PluginConfig:
    """The settings that `environment` (the process's own without it) and its file give.

    Raises ConfigError that names everything that is wrong, each by the name it was given under.
    """
    environment = os.environ if environment is None else environment
    problems: list[str] = []
    variables = {
        variable.removeprefix(_PREFIX).lower(): text
        for variable, text in environment.items()
        if variable.startswith(_PREFIX)
    }
    path = environment.get(FILE)
    values = _known(_from_file(path, problems), problems, lambda name: f"{name!r} in {path}")
    values |= _known(variables, problems, _variable)
    config = PluginConfig(**values)
    problems += [_in_our_words(problem) for problem in config.problems()]
    if problems:
        raise ConfigError(problems)
    return config


def _known(
    given: Mapping[str, Any], problems: list[str], spell: Callable[[str], str]
) -> dict[str, Any]:
    problems += [
        f"{spell(name)} is no setting of the plug-in; it has {', '.join(map(_variable, NAMES))}"
        for name in given
        if name not in NAMES
    ]
    kinds = {name: type(getattr(PluginConfig(), name)) for name in NAMES}
    return read([item for item in given.items() if item[0] in NAMES], kinds, problems, spell)


def _variable(name: str) -> str:
    return _PREFIX + name.upper()


def _from_file(path: str | None, problems: list[str]) -> Mapping[str, Any]:
    if not path:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        problems.append(f"{FILE}={path} cannot be read as JSON: {reason(error)}")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{FILE}={path} must hold one JSON object, name to value")
        return {}
    return content


def _in_our_words(problem: str) -> str:
    """A problem that names flags, with the names that the plug-in's settings have."""
    for name in NAMES:
        problem = problem.replace(flag_name(PluginConfig, name), _variable(name))
    return problem


VERSION = "0.5.23"
"""The SGLang that the plug-in is written for and tested with."""

_CACHE = "sglang.srt.mem_cache"
_ROTARY = "sglang.srt.layers.rotary_embedding.base:RotaryEmbedding"

CONTRACT: Mapping[str, tuple[str, ...]] = {
    f"{_CACHE}.registry:TreeCacheBuildContext": (
        "server_args", "params", "tp_worker", "model_config", "is_hybrid_swa", "is_hybrid_ssm",
        "disable_radix_cache", "tp_size", "tp_rank",
    ),
    f"{_CACHE}.registry:create_unified_radix_cache": ("ctx", "cache_class"),
    f"{_CACHE}.cache_init_params:CacheInitParams": (
        "token_to_kv_pool_allocator", "page_size", "enable_metrics",
    ),
    f"{_CACHE}.base_prefix_cache:MatchPrefixParams": ("key", "req"),
    f"{_CACHE}.base_prefix_cache:MatchResult": (
        "device_prefix_len", "last_device_node", "last_host_node", "best_match_node",
        "host_hit_length",
    ),
    f"{_CACHE}.base_prefix_cache:EvictParams": ("num_tokens",),
    f"{_CACHE}.base_prefix_cache:InitLoadBackParams": ("best_match_node", "host_hit_length", "req"),
    f"{_CACHE}.radix_cache:RadixKey": ("token_ids", "extra_key", "limit", "cache_salt"),
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.match_prefix": ("params",),
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.supports_fast_match_prefix": (),
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.init_load_back": ("params",),
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.load_back_is_cache_owned": (),
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.prefix_device_indices": ("req",),
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.path_device_indices": ("node",),
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.evict": ("params",),
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.lock": ("node_id",),
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.unlock": ("lock",),
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.checkpoint": ("req", "up_to"),
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.on_release": ("req", "checkpointed"),
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.reset": (),
    f"{_CACHE}.memory_pool:MHATokenToKVPool.get_key_buffer": ("layer_id",),
    f"{_CACHE}.memory_pool:MHATokenToKVPool.get_value_buffer": ("layer_id",),
    "sglang.srt.layers.radix_attention:RadixAttention.forward": ("q", "k", "v", "forward_batch"),
    f"{_ROTARY}._compute_cos_sin_cache": (),
    f"{_ROTARY}.forward_native!": ("cos_sin_cache", "index_select", "chunk"),
    "sglang.srt.model_executor.forward_batch_info:ForwardMode": ("EXTEND",),
    "sglang.srt.runtime_context:get_schedule": (),
    "sglang.srt.runtime_context:get_serving": (),
    "sglang.srt.managers.schedule_batch:Req.__init__": (
        "rid", "return_logprob", "input_embeds", "positional_embed_overrides", "session",
        "extra_key", "sampling_params",
    ),
    "sglang.srt.sampling.sampling_params:SamplingParams": ("custom_params",),
}  # fmt: skip
"""What is used of SGLang: module and object, and the parameters, fields or members it must have.

Of a method, `Class.method!`: the attributes that its code names.
"""

_ADDER = "sglang.srt.managers.schedule_policy:PrefillAdder"

CHUNKS: Mapping[str, tuple[str, ...]] = {
    "sglang.srt.plugins.hook_registry:HookRegistry.register": ("target", "hook", "hook_type"),
    "sglang.srt.plugins.hook_registry:HookType": ("AROUND", "AFTER"),
    f"{_ADDER}._select_prefill_admission": ("req", "host_hit_length", "has_chunked_req"),
    f"{_ADDER}._select_prefill_admission!": ("rem_chunk_tokens", "prefix_len"),
    f"{_ADDER}._commit_prefill_admission!": ("is_chunked", "new_chunked_req", "extend_end"),
    f"{_ADDER}.add_chunked_req": ("req",),
    f"{_ADDER}.add_chunked_req!": ("chunked_req_limit", "prefix_len", "extend_end"),
    f"{_ADDER}.__init__!": (
        "tree_cache", "page_size", "log_hit_tokens", "log_host_hit_tokens",
        "reprocessed_log_hit_tokens",
    ),
    f"{_ADDER}.budget_state!": ("rem_chunk_tokens",),
    f"{_ADDER}.preempt_to_schedule!": ("rem_total_tokens",),
    "sglang.srt.managers.schedule_policy:AddReqResult": ("OTHER",),
    "sglang.srt.managers.schedule_batch:ReqKvInfo": (
        "req_pool_idx", "kv_allocated_len", "kv_committed_len", "cache_protected_len",
    ),
    "sglang.srt.managers.schedule_batch:Req.__init__!": (
        "full_untruncated_fill_ids", "retracted_stain", "cached_tokens_host",
        "skip_radix_cache_insert",
    ),
    f"{_CACHE}.common:checkpoint_kv_cache!": ("skip_radix_cache_insert", "extend_end"),
    f"{_CACHE}.allocation:_prefix_kv_indices!": ("holds_kv", "req_to_token", "prefix_len"),
    f"{_CACHE}.memory_pool:ReqToTokenPool.write": ("indices", "values"),
}  # fmt: skip
"""The same for lending between chunks. Where SGLang differs, nothing is lent there."""


def differences(
    find: Callable[[str], Any] | None = None,
    contract: Mapping[str, tuple[str, ...]] = CONTRACT,
) -> list[str]:
    """Where SGLang (or what `find` finds under a name of `contract`) is not as listed."""
    find = find or _found
    problems = []
    for name, needed in contract.items():
        try:
            thing = find(name.removesuffix("!"))
            has = _named(thing) if name.endswith("!") else _members(thing)
        except (ImportError, AttributeError):
            problems.append(f"{name.removesuffix('!')} is not there")
            continue
        missing = [part for part in needed if part not in has]
        if missing:
            problems.append(f"{name.removesuffix('!')} has no {', '.join(missing)}")
    return problems


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    thing: Any = import_module(module)
    for part in path.split("."):
        thing = getattr(thing, part)
    return thing


def _members(thing: Any) -> set[str]:
    """Parameters of a function, fields of a record, members of an enumeration."""
    if not inspect.isclass(thing):
        return set(inspect.signature(thing).parameters)
    if is_dataclass(thing):
        return {field.name for field in fields(thing)}
    named = getattr(thing, "_fields", None) or getattr(thing, "__members__", None)
    return set(named) if named else set(inspect.signature(thing).parameters)


def _named(function: Any) -> set[str]:
    """The attributes and functions that its code names."""
    return set(inspect.unwrap(function).__code__.co_names)


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
    if not found:  # otherwise the checks below could fail themselves
        found = [*_in_flags(context), *_in_model(context), *_in_pool(context)]
    if found:
        raise UnsupportedModelError(
            f"--radix-cache-backend {BACKEND} does not work with this server: " + "; ".join(found)
        )


def without_chunks() -> list[str]:
    """Why no runs can be lent between chunks; a server serves the one behind the prefix anyway."""
    from sglang.srt.runtime_context import get_schedule

    found = [f"in this SGLang, {at}" for at in differences(contract=CHUNKS)]
    if found:
        return found
    size = get_schedule().chunked_prefill_size
    if size is None or size <= 0:
        found.append("--chunked-prefill-size turns chunks off")
    if not hasattr(_found(f"{_ADDER}.add_chunked_req"), "__wrapped__"):
        found.append("SGLang has not applied the plug-in's hooks; its log says why")
    return found


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
