"""A second plug-in, for tests: in SGLang's scheduler, holds lent KV against computed KV.

Wherever a span is lent, its first layer's keys and values are computed afresh from the tokens, and
the largest differences are appended, a JSON line each, to the file that KVWEAVE_PROBE names.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch


def register() -> None:
    file = os.environ.get("KVWEAVE_PROBE")
    if not file:
        return
    from kvweave.integrations.sglang import factory

    build = factory.build_cache

    def build_probed(context: Any) -> Any:
        cache = build(context)
        model = context.tp_worker.model_runner.model
        load = cache.init_load_back

        def load_probed(params: Any) -> Any:
            loaded = load(params)
            if loaded[0]:
                with open(file, "a", encoding="utf-8") as lines:
                    lines.write(json.dumps(_compared(cache, model, params.req, loaded[0])) + "\n")
            return loaded

        cache.init_load_back = load_probed
        return cache

    factory.build_cache = build_probed


def _compared(cache: Any, model: Any, req: Any, lent: int) -> dict[str, float]:
    from kvweave.integrations.sglang.layers import _Handed, _plain_batch, _stopped

    start = req.prefix_len
    layer = model.model.layers[0]
    tokens = torch.tensor(list(req.full_untruncated_fill_ids[start : start + lent]))
    with torch.inference_mode():
        hidden = layer.input_layernorm(model.model.embed_tokens(tokens))
        try:
            with _stopped(layer.self_attn.attn):
                layer.self_attn(torch.arange(start, start + lent), hidden, _plain_batch())
        except _Handed as fresh:
            slots = cache._lent[req]
            pool = cache.token_to_kv_pool_allocator.get_kvcache()
            pairs = (fresh.key, pool.get_key_buffer(0)), (fresh.value, pool.get_value_buffer(0))
            key, value = (
                (new.flatten() - kept[slots].flatten()).abs().max().item() for new, kept in pairs
            )
            return {"lent": lent, "start": start, "key": key, "value": value}
    raise AssertionError("the first layer does not attend")
