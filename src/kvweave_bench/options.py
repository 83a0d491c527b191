"""Names and options of all benches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvweave.config.base import flag

BENCHES = (
    "cold-groups",
    "engine",
    "peers",
    "repeats",
    "moved",
    "shapes",
    "lookup",
    "unrelated",
    "salts",
    "heal",
    "restart",
    "grammar",
    "kv-dtype",
    "shared",
    "paraphrase-gate",
    "semantic",
    "quality",
    "agents",
)
"""Names of all benches, in the order in which all of them are run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What every bench can be told; the command line is derived from it, like all flags."""

    model: str | None = flag(None, "Model to measure with; the packaged one without it.")
    quantization: str = flag(
        "auto",
        "What becomes of its weights, as in kvweave serve.",
        choices=("auto", "none", "int8", "int4"),
    )
    n: int | None = flag(None, "How many cases or rounds; the bench's own number without it.")
    seed: int = flag(0, "Chooses texts and orders; the same seed gives the same prompts.")
    quick: bool = flag(False, "A smoke test in seconds: small, few, and no figures to quote.")

    html: str | None = flag(None, "File for a page with plots (bench quality).")
    cells: str | None = flag(
        None, "Kinds of prompts, or figures, by commas; all without it (bench quality, peers)."
    )
    arms: str | None = flag(
        None, "What is compared, as in copy/0,zero-mask/0; all without it (bench quality)."
    )
    neighbour: bool | None = flag(
        None, "Measure beside a process that keeps one core busy (bench engine)."
    )

    SPECIAL: ClassVar[tuple[str, ...]] = ("html", "cells", "arms", "neighbour")
    """Options that only some benches take."""

    def problems(self) -> list[str]:
        found = []
        if self.n is not None and self.n < 1:
            found.append(f"--n must be above 0, not {self.n}")
        if self.seed < 0:
            found.append(f"--seed must not be negative, but is {self.seed}")
        return found
