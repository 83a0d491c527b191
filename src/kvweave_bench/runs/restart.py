"""Bench: with --kv-store, first token after a restart, start-up, token gaps during a prefetch."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvweave.config import CacheConfig, EngineConfig
from kvweave.engine.types import GenerateRequest, SamplingParams
from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Namespace
from kvweave.store.pages import PageStore
from kvweave_bench.base import Bench
from kvweave_bench.driver import Answer, Driver
from kvweave_bench.measure import Against, quiet_collector, ratio_row, row, seconds
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting
from kvweave_bench.workloads.prompts import Wrapped, wrapped_documents

_LENGTH, _QUICK_LENGTH, _WRAPPER_ROOM = 8192, 512, 128
_STORED_BYTES, _QUICK_STORED_BYTES = 10_000_000_000, 10_000_000
_STARTS = 5
_DECODED, _QUICK_DECODED = 96, 8
"""Tokens that another request generates while the store is read."""


@dataclass(slots=True)
class _Findings:
    warm_ms: list[float] = field(default_factory=list)
    cold_ms: list[float] = field(default_factory=list)
    served: list[float] = field(default_factory=list)
    identical: list[float] = field(default_factory=list)


def measure(setting: Setting) -> list[Row]:
    """Each round has a document of its own; all figures are those of engines just begun."""
    length = _QUICK_LENGTH if setting.quick else _LENGTH
    found = {"exact": _Findings(), "moved": _Findings()}
    gaps: dict[str, list[float]] = {"prefetch": [], "alone": []}
    with (
        tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder,
        setting.progress("prompts", 5 * setting.n) as advance,
    ):
        cold = Driver(setting.loaded, _config("none", length, None))
        cold.serve([setting.corpus.take(64)])  # warms up
        for _ in range(setting.n):
            document = setting.corpus.take(length - _WRAPPER_ROOM - 1)
            donor, other = wrapped_documents(setting.corpus, document, 2, _WRAPPER_ROOM)
            config = _config("fuzzy_match", length, folder)
            _serve_once(setting, config, donor.tokens)
            advance()
            for variant, prompt in (("exact", donor), ("moved", other)):
                (before,) = cold.serve([prompt.tokens])
                after = _serve_once(setting, config, prompt.tokens)
                _count(found[variant], before, after, prompt)
                advance()
                advance()
            _gaps_during_prefetch(setting, config, donor.tokens, gaps)
    rows: list[Row] = []
    for variant, each in found.items():
        rows += _rows(variant, each)
    return rows + _gap_rows(gaps) + _start_rows(setting)


def _serve_once(setting: Setting, config: EngineConfig, prompt: IntArray) -> Answer:
    """The answer of an engine that starts for it, and stops afterwards."""
    driver = Driver(setting.loaded, config)
    try:
        (answer,) = driver.serve([prompt])
        return answer
    finally:
        driver.engine.close()


def _count(found: _Findings, cold: Answer, warm: Answer, prompt: Wrapped) -> None:
    usage = warm.usage
    found.warm_ms.append(1e3 * warm.first_token_seconds)
    found.cold_ms.append(1e3 * cold.first_token_seconds)
    found.served.append((usage.cached_tokens + usage.moved_tokens) / len(prompt.tokens))
    found.identical.append(float(cold.token_ids == warm.token_ids))


def _rows(variant: str, found: _Findings) -> list[Row]:
    n = len(found.served)
    return [
        ratio_row("first_token_speedup", variant, found.warm_ms, Against("cold", found.cold_ms)),
        row("first_token_ms", variant, found.warm_ms, "ms"),
        row("first_token_ms", f"{variant}, cold", found.cold_ms, "ms"),
        Row(metric="served", arm=variant, value=min(found.served), unit="share", n=n),
        Row(metric="identical_ids", arm=variant, value=min(found.identical), unit="share", n=n),
    ]


def _gaps_during_prefetch(
    setting: Setting, config: EngineConfig, stored: IntArray, gaps: dict[str, list[float]]
) -> None:
    """Token gaps of a request while another's KV is read, and without that.

    Only steps in which the other request still waits count: what it computes itself is no matter of
    the store.
    """
    driver = Driver(setting.loaded, config)
    engine, decoded = driver.engine, _QUICK_DECODED if setting.quick else _DECODED
    store = engine.components.store
    if store is None:
        raise KvweaveError("the store could not be opened")
    engine.add(_request("decoding", setting.corpus.take(64), 16 * decoded))  # never ends
    try:
        with quiet_collector():
            for _ in range(8):  # its prompt, and what the first steps have to warm up
                engine.step()
            for _ in range(decoded):
                gaps["alone"].append(1e3 * seconds(engine.step))
            engine.add(_request("stored", stored, 1))
            while True:
                gap = 1e3 * seconds(engine.step)
                if not store.figures()["waiting_loads"]:
                    break  # it was admitted within this step, and has computed
                gaps["prefetch"].append(gap)
    finally:
        engine.abort("decoding")
        engine.abort("stored")
        engine.close()


def _request(rid: str, prompt: IntArray, tokens: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(rid=rid, prompt_ids=tuple(prompt.tolist()), sampling=sampling)


def _gap_rows(gaps: dict[str, list[float]]) -> list[Row]:
    rows = []
    alone = float(np.percentile(gaps["alone"], 99))
    for variant, figures in gaps.items():
        if not figures:
            continue  # nothing was read: computing is faster
        p99 = float(np.percentile(figures, 99))
        rows += [
            row("token_gap_ms", variant, figures, "ms"),
            Row(
                metric="token_gap_p99_ms",
                arm=variant,
                value=p99,
                unit="ms",
                n=len(figures),
                baseline="alone" if variant != "alone" else None,
                ratio=alone / p99 if variant != "alone" else None,
            ),
        ]
    return rows


def _start_rows(setting: Setting) -> list[Row]:
    """Time to build an engine without a store, and over a large one.

    The large one has all of its catalogue; the content of its pages, which nothing reads at start,
    is a hole in the file.
    """
    size = _QUICK_STORED_BYTES if setting.quick else _STORED_BYTES
    figures: dict[str, list[float]] = {"no store": [], f"{size / 1e9:g} GB": []}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        _fill(setting, Path(folder), size)
        for _ in range(_STARTS):
            for name, where in zip(figures, (None, folder), strict=True):
                config = _config("fuzzy_match", _LENGTH, where)
                began = time.perf_counter()
                engine = Driver(setting.loaded, config).engine
                figures[name].append(1e3 * (time.perf_counter() - began))
                engine.close()
    names = list(figures)
    return [
        row("start_ms", names[0], figures[names[0]], "ms"),
        row("start_ms", names[1], figures[names[1]], "ms", Against(names[0], figures[names[0]])),
    ]


def _fill(setting: Setting, folder: Path, size: int) -> None:
    """A store with the catalogue of `size` bytes, as paths of random tokens."""
    engine = Driver(setting.loaded, _config("fuzzy_match", _LENGTH, str(folder))).engine
    store = engine.components.store
    assert store is not None
    page_format = store.page_format
    engine.close()
    pages = PageStore(folder, page_format, 2 * size)
    catalog = pages.connect(engine.config.fuzzy.stride)
    root, stored = pages.root(catalog, Namespace("bench")), 0
    rng, per_path = np.random.default_rng(setting.seed), _LENGTH // page_format.page_size
    while stored * page_format.page_bytes < size:
        tokens = rng.integers(0, setting.loaded.vocab_size, _LENGTH).astype(np.int32)
        places = [(slot, bytes(16)) for slot in range(stored, stored + per_path)]
        with catalog.changing():
            catalog.add(root, tokens, 0, places)
        stored += per_path
    os.truncate(pages.folder / "pages", stored * page_format.page_bytes)
    catalog.close()
    pages.close()


def _config(backend: str, length: int, folder: str | None) -> EngineConfig:
    # Room for the donor, for the prompt that is served from it, and for one more that generates.
    cache = CacheConfig(
        prefix_cache_backend=backend,
        max_total_tokens=3 * length,
        kv_store=folder,
        kv_store_gb=2 * _STORED_BYTES / 1e9,
    )
    return EngineConfig(cache=cache)


BENCH = Bench(
    name="restart",
    counts="documents",
    n=4,
    quick_n=1,
    measure=measure,
)
