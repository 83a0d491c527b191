"""kvweave serves language models and reuses the KV cache of earlier prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvweave.version import __version__

if TYPE_CHECKING:
    from kvweave.engine.llm import LLM
    from kvweave.engine.types import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: torch and the models' code take seconds, and --help needs none of it.
    if name == "LLM":
        from kvweave.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from kvweave.engine.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
