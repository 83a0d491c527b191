"""kvweave serves language models and never computes the same text twice."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvweave.engine.llm import LLM
    from kvweave.engine.types import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

try:
    __version__ = version("kvweave")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+source"


def __getattr__(name: str) -> Any:
    # Loaded when asked for: torch and the models' code take seconds, and --help needs none of it.
    if name == "LLM":
        from kvweave.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from kvweave.engine.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
