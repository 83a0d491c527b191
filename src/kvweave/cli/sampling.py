"""Flags that say how answers are sampled, for `generate` and `chat`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvweave.config_checks import flag_name
from kvweave.engine.types import SamplingParams
from kvweave.errors import RequestError


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How answers are sampled."""

    max_tokens: int = _flag(256, "Longest answer.")
    temperature: float = _flag(0.7, "0 always takes the likeliest token.")
    top_p: float = _flag(1.0, "Sample among the likeliest tokens that make up this probability.")
    top_k: int = _flag(-1, "Sample among this many likeliest tokens; -1: all.")
    repetition_penalty: float = _flag(1.0, "Above 1, what was said already becomes less likely.")
    seed: int | None = _flag(None, "The same seed gives the same answer.")

    def problems(self) -> list[str]:
        try:
            self.params().validate()
        except RequestError as error:
            name = error.param or ""
            return [error.message.replace(name, flag_name(name), 1)]
        return []

    def params(self, **more: Any) -> SamplingParams:
        """What the engine is told."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            **more,
        )
