"""Bench: drafts from text that is there, on answers that quote their prompt and on others."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field

from kvweave.config import CacheConfig, EngineConfig, SpeculativeConfig
from kvweave.kv.pool import IntArray
from kvweave_bench.base import Bench
from kvweave_bench.driver import Answer, Driver
from kvweave_bench.measure import Against, ratio_row, row
from kvweave_bench.quality.chat import Chat
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting

_ANSWER, _QUICK_ANSWER = 128, 24
_SLOTS = 8192
_LONGEST_CODE = 1200
"""Characters of a function that is to be refactored."""
_OFF, _ON = "none", "NGRAM"

_QUOTING = (
    "Quote, word for word, all sentences of this text that hold a number:\n\n{text}",
    "Write this text again, with {name} called Freedonia everywhere:\n\n{text}",
    "Correct the spelling of this text, and answer with the whole text:\n\n{text}",
    "Rename the first parameter of this function to `given`, and answer with the whole function:"
    "\n\n```python\n{code}```",
)
_OTHER = (
    "Write a short story about a day in {name}.",
    "Explain to a child why people travel to {name}.",
    "Write a letter to a friend who is about to move to {name}.",
    "Think of four questions about {name} for a quiz, without answers.",
)


@dataclass(slots=True)
class _Findings:
    token_ms: dict[str, list[float]] = field(default_factory=lambda: {_OFF: [], _ON: []})
    identical: list[bool] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    generated: int = 0


def measure(setting: Setting) -> list[Row]:
    """Each prompt is answered without and with drafts, in turns; an answer ends by itself."""
    corpus = setting.corpus
    chat = Chat(setting.loaded.tokenizer, corpus.tokens)
    code = _functions()
    drivers = {name: Driver(setting.loaded, _config(setting, name)) for name in (_OFF, _ON)}
    for driver in drivers.values():
        driver.serve([corpus.take(64)], max_tokens=8)  # warms up
    found = {"quoting": _Findings(), "other": _Findings()}
    countries = corpus.passages("countries", setting.n)
    with setting.progress("prompts", 2 * setting.n) as advance:
        for index, country in enumerate(countries):
            said = {
                "name": country.title,
                "text": country.body,
                "code": code[index % len(code)],
            }
            for kind, asked in (("quoting", _QUOTING), ("other", _OTHER)):
                message = asked[index % len(asked)].format(**said)
                prompt = chat.prompt(("user", corpus.tokens(message)))
                _count(found[kind], drivers, prompt, index, setting.quick)
                advance()
    return [line for kind, each in found.items() for line in _rows(kind, each)]


def _config(setting: Setting, algorithm: str) -> EngineConfig:
    return EngineConfig(
        model=setting.model_config,
        cache=CacheConfig(max_total_tokens=_SLOTS),
        speculative=SpeculativeConfig(algorithm=algorithm),
    )


def _count(
    found: _Findings, drivers: dict[str, Driver], prompt: IntArray, index: int, quick: bool
) -> None:
    longest = _QUICK_ANSWER if quick else _ANSWER
    names = list(drivers) if index % 2 else list(reversed(drivers))
    before = drivers[_ON].engine.snapshot()
    answers = {
        name: drivers[name].serve([prompt], max_tokens=longest, ignore_eos=False)[0]
        for name in names
    }
    after = drivers[_ON].engine.snapshot()
    found.drafted += after.drafted_tokens - before.drafted_tokens
    found.accepted += after.accepted_tokens - before.accepted_tokens
    found.generated += after.generated_tokens - before.generated_tokens
    found.identical.append(answers[_OFF].token_ids == answers[_ON].token_ids)
    if min(len(each.token_ids) for each in answers.values()) > longest // 8:
        for name, answer in answers.items():
            found.token_ms[name].append(1e3 * _per_token(answer))


def _per_token(answer: Answer) -> float:
    """Mean seconds per token behind the first."""
    taken = answer.token_seconds[-1] - answer.first_token_seconds
    return taken / (len(answer.token_ids) - 1)


def _rows(kind: str, found: _Findings) -> list[Row]:
    n = len(found.identical)
    rows = []
    if found.token_ms[_ON]:
        off = Against(_OFF, found.token_ms[_OFF])
        rows += [
            ratio_row("decode_speedup", kind, found.token_ms[_ON], off),
            row("token_ms", kind, found.token_ms[_ON], "ms"),
            row("token_ms", f"{kind}, {_OFF}", found.token_ms[_OFF], "ms"),
        ]
    shares = {
        "identical_ids": sum(found.identical) / n,
        "accepted_share": found.accepted / max(found.drafted, 1),
        "drafted_share": found.accepted / max(found.generated, 1),
    }
    return rows + [
        Row(metric=metric, arm=kind, value=value, unit="share", n=n)
        for metric, value in shares.items()
    ]


def _functions() -> list[str]:
    """Functions of Python's own library, none too long: code that is on every machine."""
    found: list[str] = []
    for module in (textwrap, inspect, ast):
        functions = inspect.getmembers(module, inspect.isfunction)
        of_module: list[Callable[..., object]] = [
            each for _, each in functions if each.__module__ == module.__name__
        ]
        sources = [inspect.getsource(each) for each in of_module]
        found += [text for text in sources if 300 < len(text) < _LONGEST_CODE]
    return found


BENCH = Bench(
    name="repeats",
    counts="prompts that quote, and as many others",
    n=100,
    quick_n=4,
    measure=measure,
)
