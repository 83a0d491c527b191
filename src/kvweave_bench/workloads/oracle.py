"""The share of a prompt that earlier prompts hold, computed exactly and without an index."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvweave.kv.pool import IntArray


def shared_positions(
    prompt: IntArray, donors: Iterable[IntArray], min_run: int = 32
) -> npt.NDArray[np.bool_]:
    """Which positions of `prompt` lie inside a run of at least `min_run` tokens that a donor holds.

    A position does exactly if one of the windows of `min_run` tokens that cover it occurs in a
    donor, so the windows' bytes are compared as wholes.
    """
    covered = np.zeros(len(prompt), np.bool_)
    wanted = _windows(prompt, min_run)
    if not len(wanted):
        return covered
    held = [windows for donor in donors if len(windows := _windows(donor, min_run))]
    if not held:
        return covered
    hits = np.flatnonzero(np.isin(wanted, np.concatenate(held)))
    # +1 where a covered window begins, -1 behind its end: positive sums are covered.
    steps = np.zeros(len(prompt) + 1, np.int64)
    np.add.at(steps, hits, 1)
    np.add.at(steps, hits + min_run, -1)
    return np.cumsum(steps[:-1]) > 0


def shared_share(prompt: IntArray, donors: Iterable[IntArray], min_run: int = 32) -> float:
    """The share of `prompt` inside shared runs; see `shared_positions`."""
    return float(shared_positions(prompt, donors, min_run).mean()) if len(prompt) else 0.0


def _windows(tokens: IntArray, width: int) -> npt.NDArray[np.void]:
    """All windows of `width` tokens as opaque values that compare byte for byte."""
    if len(tokens) < width:
        return np.zeros(0, np.dtype((np.void, 4 * width)))
    rows = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(tokens, np.int32), width)
    return np.ascontiguousarray(rows).view(np.dtype((np.void, 4 * width))).ravel()
