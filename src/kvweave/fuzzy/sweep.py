"""From windows that might match to the runs around them, looking at no run twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

DOORS_TRIED = 4
"""How many places of the same block are compared for the longest run."""


class Run(Protocol):
    """Equal tokens from position `start` of the prompt on."""

    @property
    def start(self) -> int: ...

    @property
    def length(self) -> int: ...


RunT = TypeVar("RunT", bound=Run)


def runs_through(
    offsets: npt.NDArray[np.intp],
    shortest: int,
    longest_at: Callable[[int], RunT | None],
    seconds: float,
) -> list[RunT]:
    """Runs of at least `shortest` tokens through windows at `offsets` (ascending), last one first.

    `longest_at` gives the longest run through the window at `offsets[i]`, or None if its hash lied.
    From the right, since the newest door of a periodic text is its deepest, from where one look
    finds all of it. Windows inside a run found are passed over. Stops after `seconds` with what
    there is: a prompt made of very many small pieces is not worth looking at all of them.
    """
    runs: list[RunT] = []
    at = len(offsets) - 1
    deadline = time.perf_counter() + seconds
    while at >= 0 and time.perf_counter() < deadline:
        run = longest_at(at)
        if run is None or run.length < shortest:
            at -= 1
        else:
            runs.append(run)
            at = int(np.searchsorted(offsets, run.start)) - 1
    return runs
