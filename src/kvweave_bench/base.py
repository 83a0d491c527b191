"""The Bench: a name, defaults, and the function that measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvweave_bench.report import Row
from kvweave_bench.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One benchmark. `counts` says what `n` counts, as in "groups of 16 prompts".

    `takes` names the options in BenchOptions.SPECIAL that mean something to it.
    """

    name: str
    counts: str
    n: int
    quick_n: int
    measure: Callable[[Setting], list[Row]]
    takes: tuple[str, ...] = ()
