"""A second plug-in, for tests: in SGLang's scheduler, holds lent KV against computed KV.

Wherever a run is lent, its first layer's keys and values are computed afresh from the tokens, and
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
    from kvweave.integrations.sglang import cache as module

    build = module.build_cache

    def build_probed(context: Any) -> Any:
        cache = build(context)
        model = context.tp_worker.model_runner.model
        fill = cache.filled

        def fill_probed(req: Any, loan: Any) -> Any:
            slots = fill(req, loan)
            if slots is not None:
                with open(file, "a", encoding="utf-8") as lines:
                    compared = _compared(cache, model, req, loan.run, slots)
                    lines.write(json.dumps(compared) + "\n")
            return slots

        release = cache.on_release

        def release_probed(req: Any, *, checkpointed: bool) -> None:
            left = len(req.full_untruncated_fill_ids) - (req.extend_end or 0)
            if not checkpointed and left > 0 and req in cache.loans:
                with open(file, "a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"aborted": req.rid, "left": left}) + "\n")
            release(req, checkpointed=checkpointed)

        cache.filled, cache.on_release = fill_probed, release_probed
        return cache

    module.build_cache = build_probed


def _compared(cache: Any, model: Any, req: Any, run: Any, slots: Any) -> dict[str, Any]:
    from kvweave.integrations.sglang.layers import _Handed, _plain_batch, _stopped

    layer = model.model.layers[0]
    tokens = torch.tensor(list(req.full_untruncated_fill_ids[run.start : run.end]))
    with torch.inference_mode():
        hidden = layer.input_layernorm(model.model.embed_tokens(tokens))
        try:
            with _stopped(layer.self_attn.attn):
                layer.self_attn(torch.arange(run.start, run.end), hidden, _plain_batch())
        except _Handed as fresh:
            pool = cache.token_to_kv_pool_allocator.get_kvcache()
            pairs = (fresh.key, pool.get_key_buffer(0)), (fresh.value, pool.get_value_buffer(0))
            key, value = (_difference(new, kept[slots]) for new, kept in pairs)
            return {
                "rid": req.rid,
                "lent": run.length,
                "start": run.start,
                "donors": len(run.pieces),
                "key": key,
                "value": value,
            }
    raise AssertionError("the first layer does not attend")


def _difference(fresh: torch.Tensor, kept: torch.Tensor) -> float:
    """The least tolerance, absolute and relative together, that both are equal within.

    kept: (tokens, heads, dim); fresh: the same numbers in any shape.
    """
    fresh = fresh.view_as(kept)
    return float(((fresh - kept).abs() / (1 + fresh.abs())).max())
