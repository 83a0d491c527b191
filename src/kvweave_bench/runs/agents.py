"""Bench: an agent's session, whose prompts begin with lines that change and carry a history."""

from __future__ import annotations

import json

from kvweave.config import CacheConfig, EngineConfig
from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray
from kvweave_bench.base import Bench
from kvweave_bench.driver import Answer, Driver
from kvweave_bench.measure import Against, ratio_row, row
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting
from kvweave_bench.workloads.corpus import Corpus

_CALLS, _QUICK_CALLS = 20, 4
_TOOLS, _QUICK_TOOLS = 14, 4
_WORDS, _QUICK_WORDS = 60, 8
"""Words that describe a tool, and half of those of a tool's result."""
_ARMS = ("radix", "fuzzy_match")


def measure(setting: Setting) -> list[Row]:
    """Both arms serve the same sessions, call by call, and take turns at going first."""
    calls = _QUICK_CALLS if setting.quick else _CALLS
    sessions = [_session(setting, number, calls) for number in range(setting.n)]
    longest = max(len(prompt) for prompts in sessions for prompt in prompts)
    drivers = {name: _driver(setting, name, longest) for name in _ARMS}
    shares: dict[str, list[float]] = {name: [] for name in _ARMS}
    first: dict[str, list[float]] = {name: [] for name in _ARMS}
    with setting.progress("calls", len(_ARMS) * setting.n * calls) as advance:
        for number, prompts in enumerate(sessions):
            for call, prompt in enumerate(prompts):
                for name in _ARMS if call % 2 else reversed(_ARMS):
                    salt = f"session {number}"  # nothing is reused across sessions
                    [answer] = drivers[name].serve([prompt], salt=salt, session=salt)
                    if call:  # from the second on there is something to reuse
                        shares[name].append(_reused(answer))
                        first[name].append(1e3 * answer.first_token_seconds)
                    advance()
    against = Against("radix", first["radix"])
    rows = [row("reused_share", name, shares[name], "share") for name in _ARMS]
    rows += [
        Row(metric="least_reused_share", arm=name, value=min(found), unit="share", n=len(found))
        for name, found in shares.items()
    ]
    rows += [row("first_token_ms", name, first[name], "ms") for name in _ARMS]
    lengths = [float(len(prompt)) for prompts in sessions for prompt in prompts[1:]]
    return [
        *rows,
        ratio_row("first_token_speedup", "fuzzy_match", first["fuzzy_match"], against),
        row("prompt_tokens", "both", lengths, "tokens"),
    ]


def _driver(setting: Setting, name: str, longest: int) -> Driver:
    cache = CacheConfig(prefix_cache_backend=name, max_total_tokens=(longest // 16 + 2) * 16 * 4)
    return Driver(setting.loaded, EngineConfig(model=setting.model_config, cache=cache))


def _reused(answer: Answer) -> float:
    """The share of the prompt that was not computed. KvweaveError if its usage does not add up."""
    reuse, prompt = answer.usage.reuse, len(answer.prompt)
    served = reuse.exact + reuse.moved + reuse.paraphrase
    if answer.usage.prompt_tokens != prompt or served + reuse.recomputed > prompt:
        raise KvweaveError(f"the usage of {prompt} prompt tokens does not add up: {answer.usage}")
    return served / prompt


def _session(setting: Setting, number: int, calls: int) -> list[IntArray]:
    """The prompts of one session: a changing head, tools, and a history that grows with each call.

    The shape is that of public chat protocols; all words are the corpus's.
    """
    corpus, quick = setting.corpus, setting.quick
    words = _QUICK_WORDS if quick else _WORDS
    tools = [_tool(corpus, at, words) for at in range(_QUICK_TOOLS if quick else _TOOLS)]
    system = f"You are an agent. Your tools:\n{json.dumps(tools, indent=1)}"
    history = [_turn("user", f"Find out about this: {_prose(corpus, words // 4)}")]
    prompts = []
    for call in range(calls):
        text = _turn("system", f"{_head(corpus, number, call)}\n{system}")
        prompts.append(corpus.tokens(f"{text}{''.join(history)}<|im_start|>assistant\n"))
        chosen = tools[int(corpus.rng.integers(len(tools)))]["function"]["name"]
        asked = {"name": chosen, "arguments": {"about": _prose(corpus, words // 10)}}
        found = {"status": "ok", "result": _prose(corpus, words // 2)}
        history.append(_turn("assistant", f"<tool_call>{json.dumps(asked)}</tool_call>"))
        history.append(_turn("tool", json.dumps(found)))
    return prompts


def _head(corpus: Corpus, number: int, call: int) -> str:
    """Lines of another wording and length with every call."""
    name = "".join(f"{part:x}" for part in corpus.rng.integers(1, 2**16, 2 + call % 3))
    return f"x-request-id: {name}\nThe time is {9 + number % 9}:{call:02}:{call * 7 % 60:02}."


def _tool(corpus: Corpus, at: int, words: int) -> dict[str, dict[str, object]]:
    text: object = {"type": "string", "description": _prose(corpus, words // 4)}
    parameters: object = {"type": "object", "properties": {"about": text}, "required": ["about"]}
    function = {
        "name": f"tool_{at}",
        "description": _prose(corpus, words),
        "parameters": parameters,
    }
    return {"function": function}


def _turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _prose(corpus: Corpus, words: int) -> str:
    return " ".join(corpus.words(max(1, words)))


BENCH = Bench(
    name="agents",
    counts="sessions",
    n=2,
    quick_n=1,
    measure=measure,
)
