"""SGLang itself, on CPU, with the packaged model."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

STUBS = Path(__file__).parents[1] / "stubs"

ENVIRONMENT = {
    "PYTHONPATH": str(STUBS),
    "OMP_NUM_THREADS": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
}
ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.3,
    "context_length": 2048,
    "max_total_tokens": 8192,
    "max_running_requests": 8,
}


class Engine:
    """An SGLang engine and what its requests report."""

    def __init__(self, engine: Any, probe: Path) -> None:
        self._engine, self._probe = engine, probe

    def ask(self, prompts: list[str], tokens: int = 8, **sampling: Any) -> list[dict[str, Any]]:
        """Greedy answers of exactly that many tokens, together; each with SGLang's meta_info."""
        asked = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **sampling}
        return list(self._engine.generate(prompts, [dict(asked) for _ in prompts]))

    def answer(self, prompt: str, tokens: int = 8, **sampling: Any) -> tuple[str, int]:
        """A greedy answer, and how many tokens of the prompt were lent."""
        [found] = self.ask([prompt], tokens, **sampling)
        return found["text"], lent(found)

    def first_token(self, prompt: str) -> float:
        """Seconds to the first token."""
        begin = time.perf_counter()
        self.ask([prompt], 1)
        return time.perf_counter() - begin

    def flush(self) -> bool:
        """Empty the cache; SGLang refuses while anything is held."""
        time.sleep(1)
        return bool(self._engine.flush_cache().success)

    def probed(self) -> list[dict[str, float]]:
        """Every span that was lent, held against fresh KV."""
        lines = self._probe.read_text().splitlines() if self._probe.exists() else []
        return [json.loads(line) for line in lines]


def lent(found: dict[str, Any]) -> int:
    """Tokens that SGLang reports as host hits: there is no host cache, so they were lent."""
    details = found["meta_info"]["cached_tokens_details"] or {}
    return int(details.get("host", 0))


@contextmanager
def running(probe: Path, environment: dict[str, str], **arguments: Any) -> Iterator[Engine]:
    """An engine with these arguments; its processes see the environment."""
    import sglang

    asked = {**ENVIRONMENT, "KVWEAVE_PROBE": str(probe), **environment}
    before = {name: os.environ.get(name) for name in asked}
    os.environ.update(asked)
    try:
        asked_for = {"model_path": str(model_folder()), **ARGUMENTS, **arguments}
        engine = sglang.Engine(log_level="warning", **asked_for)
        try:
            yield Engine(engine, probe)
        finally:
            engine.shutdown()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def server_arguments() -> list[str]:
    """The same for SGLang's command line."""
    flags = {f"--{name.replace('_', '-')}": str(value) for name, value in ARGUMENTS.items()}
    return ["--model-path", str(model_folder()), *(word for flag in flags.items() for word in flag)]


def model_folder() -> Path:
    """The packaged model's folder, as `make model` leaves it."""
    cache = Path(os.environ.get("KVWEAVE_CACHE") or Path.home() / ".cache" / "kvweave")
    folders = sorted((cache / "models").glob("SmolLM2-135M-Instruct-*-float32-*"))
    if not folders:
        pytest.fail(f"the packaged model is not in {cache}; run `make model` first")
    return folders[-1]
