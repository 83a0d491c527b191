"""Bench: what each number type of KV costs answers, exact and moved, and what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from kvweave import kernels
from kvweave.config import CacheConfig, EngineConfig
from kvweave.kv.pool import IntArray
from kvweave.kv.tensors import KVTensors
from kvweave.models.load import LoadedModel
from kvweave_bench.base import Bench
from kvweave_bench.driver import Driver
from kvweave_bench.measure import Against, alternate, row
from kvweave_bench.quality.session import Session
from kvweave_bench.quality.variants import DEFAULT, Variant
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting
from kvweave_bench.workloads.prompts import wrapped_documents

_TYPES = tuple(kernels.NUMBER_TYPES)
_DOCUMENT, _QUICK_DOCUMENT = 512, 128
_WRAPPER_ROOM = 128
_ANSWER = 16
_CONTEXT, _QUICK_CONTEXT = 4096, 512
_ROUNDS, _QUICK_ROUNDS = 7, 1
EXACT, MOVED = "exact", "moved"


def measure(setting: Setting) -> list[Row]:
    """Divergence from float32 KV with equal reuse, tokens of a pool, and the speed of decoding."""
    loaded = {_name(dtype): replace(setting.loaded, kv_dtype=dtype) for dtype in _TYPES}
    rows = []
    per_token = {
        name: KVTensors.bytes_per_slot(each.layouts, each.kv_dtype) for name, each in loaded.items()
    }
    for name, size in per_token.items():
        ratio = per_token["float32"] / size
        rows.append(Row(metric="pool_tokens", arm=name, value=ratio, unit="x", n=1))
    return rows + _divergence(setting, loaded) + _speed(setting, loaded)


def _divergence(setting: Setting, loaded: dict[str, LoadedModel]) -> list[Row]:
    """KL (nats) of the answer's tokens from those of the same prompt served alike in float32."""
    document = _QUICK_DOCUMENT if setting.quick else _DOCUMENT
    slots = 4 * (document + _WRAPPER_ROOM + _ANSWER)
    sessions = {
        (name, kind): Session(
            each, setting.model_config, None if kind == EXACT else Variant(DEFAULT), slots
        )
        for name, each in loaded.items()
        for kind in (EXACT, MOVED)
    }
    found: dict[tuple[str, str], list[float]] = {at: [] for at in sessions}
    with setting.progress("prompts", setting.n * len(sessions)) as advance:
        for _ in range(setting.n):
            text = setting.corpus.take(document)
            donor, prompt = (
                each.tokens for each in wrapped_documents(setting.corpus, text, 2, _WRAPPER_ROOM)
            )
            right: dict[str, torch.Tensor] = {}
            forced: tuple[int, ...] = ()
            for (name, kind), session in sessions.items():
                logits, forced = _answer(session, kind, donor, prompt, forced)
                right.setdefault(kind, logits)  # float32 comes first in the table
                found[name, kind].append(_kl(right[kind], logits))
                advance()
    return [
        replace(row("kl_mean", f"{name}, {kind}", figures, "nats"), value=float(np.mean(figures)))
        for (name, kind), figures in found.items()
        if name != "float32"
    ]


def _answer(
    session: Session, kind: str, donor: IntArray, prompt: IntArray, forced: Sequence[int]
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Log probabilities (T, V) of an answer of the tokens `forced` (greedy without), and these."""
    session.forget()
    if kind == MOVED:
        session.serve(donor, 1)
    trace = session.serve(prompt, _ANSWER, forced).trace
    return trace.logits.log_softmax(-1), trace.tokens


def _kl(right: torch.Tensor, other: torch.Tensor) -> float:
    count = min(len(right), len(other))
    return float((right[:count].exp() * (right[:count] - other[:count])).sum(-1).mean())


def _speed(setting: Setting, loaded: dict[str, LoadedModel]) -> list[Row]:
    """Milliseconds per token after a long context."""
    context = _QUICK_CONTEXT if setting.quick else _CONTEXT
    rounds = _QUICK_ROUNDS if setting.quick else _ROUNDS
    prefix = setting.corpus.take(context)
    cache = CacheConfig(prefix_cache_backend="radix", max_total_tokens=2 * context)
    config = EngineConfig(model=setting.model_config, cache=cache)
    drivers = {name: Driver(each, config) for name, each in loaded.items()}

    def per_token(name: str) -> float:
        seconds = drivers[name].serve([prefix], max_tokens=_ANSWER + 1)[0].token_seconds
        return 1e3 * float(np.median([after - before for before, after in pairwise(seconds)]))

    metric = f"decode_after_{context}"
    with setting.progress(metric, len(drivers) * (rounds + 1)) as advance:
        variants = {name: lambda _, name=name: per_token(name) for name in drivers}
        taken = alternate(variants, rounds, progress=advance)
    against = Against("float32", taken["float32"])
    return [
        row(metric, name, figures, "ms", None if name == "float32" else against)
        for name, figures in taken.items()
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


BENCH = Bench(
    name="kv-dtype",
    counts="prompts",
    n=24,
    quick_n=2,
    measure=measure,
)
