"""SGLang itself, on CPU, with the packaged model."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

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
    "watchdog_timeout": 3600,  # a shared machine may stop it for a while
}
VOCABULARY = 49_152
"""Token ids of the packaged model."""


class Engine:
    """An SGLang engine and what its requests report."""

    def __init__(self, engine: Any, probe: Path, page_size: int) -> None:
        self._engine, self._probe, self.page_size = engine, probe, page_size

    def ask(self, prompts: list[str], tokens: int = 8, **sampling: Any) -> list[dict[str, Any]]:
        """Greedy answers of exactly that many tokens, together; each with SGLang's meta_info."""
        return list(self._engine.generate(prompts, [_greedy(tokens, sampling) for _ in prompts]))

    def answer(self, prompt: str, tokens: int = 8, **sampling: Any) -> tuple[str, int]:
        """A greedy answer, and how many tokens of the prompt were lent."""
        [found] = self.ask([prompt], tokens, **sampling)
        return found["text"], lent(found)

    def first_token(self, prompt: str, cold: str = "") -> tuple[float, dict[str, Any]]:
        """Seconds to the first token, and what SGLang says of the request.

        `cold`: a salt of its own, with which nothing is found and nothing lent.
        """
        begin = time.perf_counter()
        found = self._engine.generate(prompt, _greedy(1, _exact(cold)), cache_salt=cold or None)
        return time.perf_counter() - begin, found

    def next_token(self, prompt: str, cold: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
        """Log-probabilities of the first token: float64 (VOCABULARY); and as `first_token`."""
        found = self._engine.generate(
            prompt,
            _greedy(1, _exact(cold)),
            return_logprob=True,
            token_ids_logprob=list(range(VOCABULARY)),
            cache_salt=cold or None,
        )
        pairs = found["meta_info"]["output_token_ids_logprobs"][0]
        order = sorted((token, value) for value, token, *_ in pairs)
        return torch.tensor([value for _, value in order], dtype=torch.float64), found

    def interrupted(
        self, prompts: list[str], tokens: int, aborted: Mapping[int, float]
    ) -> list[dict[str, Any] | BaseException]:
        """As `ask`; the prompts numbered in `aborted` are aborted after that many seconds."""

        async def one(number: int) -> Any:
            names = {"rid": f"{uuid4().hex}-{number}"}
            asked = self._engine.async_generate(prompts[number], _greedy(tokens, {}), **names)
            if number not in aborted:
                return await asked
            running = asyncio.ensure_future(asked)
            await asyncio.sleep(aborted[number])
            self._engine.tokenizer_manager.abort_request(names["rid"])
            return await running

        async def together() -> list[Any]:
            every = [one(number) for number in range(len(prompts))]
            return await asyncio.gather(*every, return_exceptions=True)

        return list(self._engine.loop.run_until_complete(together()))

    def flush(self) -> bool:
        """Empty the cache; SGLang refuses while anything is held."""
        time.sleep(1)
        return bool(self._engine.flush_cache().success)

    def counts(self) -> dict[str, Any]:
        """What /server_info shows of the plug-in."""
        [state, *_] = self._engine.get_server_info()["internal_states"]
        return dict(state["kvweave"])

    def probed(self) -> list[dict[str, Any]]:
        """Every run that was lent, held against fresh KV; aborts between chunks have no "lent"."""
        lines = self._probe.read_text().splitlines() if self._probe.exists() else []
        return [json.loads(line) for line in lines]


def _greedy(tokens: int, sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **sampling}


def _exact(cold: str) -> dict[str, Any]:
    return {"custom_params": {"kvweave_fuzzy": False}} if cold else {}


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
            yield Engine(engine, probe, arguments.get("page_size", 1))
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
    found = (cache / "models").glob("SmolLM2-135M-Instruct-*-float32-*")
    folders = sorted(at for at in found if at.name.rsplit("-", 2)[1] == "float32")
    if not folders:
        pytest.fail(f"the packaged model is not in {cache}; run `make model` first")
    return folders[-1]
