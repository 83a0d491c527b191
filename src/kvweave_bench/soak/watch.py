"""Samples of a server's process from outside (memory, files, threads), and their trend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. `rss` in MB; `engine` is /server_info's."""

    seconds: float
    rss: float
    files: int
    threads: int
    engine: dict[str, Any]


def look(pid: int, seconds: float, engine: dict[str, Any]) -> Sample:
    """Linux only."""
    here = Path("/proc") / str(pid)
    fields = dict(
        line.split(":", 1) for line in (here / "status").read_text(encoding="utf-8").splitlines()
    )
    return Sample(
        seconds,
        int(fields["VmRSS"].split()[0]) / 1024,
        len(list((here / "fd").iterdir())),
        int(fields["Threads"]),
        engine,
    )


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through the second half of a run: MB an hour, its 95 % interval, growth in it."""

    slope: float
    low: float
    high: float
    mean: float
    growth: float
    """Share of the mean by which the line rises over the second half."""


def trend(samples: Sequence[Sample]) -> Trend | None:
    """Least squares; None of too few samples."""
    half = [each for each in samples if each.seconds >= samples[-1].seconds / 2] if samples else []
    if len(half) < 5:
        return None
    at = np.array([each.seconds for each in half]) / 3600
    rss = np.array([each.rss for each in half])
    slope, offset = np.polyfit(at, rss, 1)
    residue = rss - (slope * at + offset)
    spread = float(((at - at.mean()) ** 2).sum())
    error = 2 * math.sqrt(float((residue**2).sum()) / (len(half) - 2) / spread)
    growth = slope * float(at[-1] - at[0]) / float(rss.mean())
    return Trend(
        float(slope), float(slope) - error, float(slope) + error, float(rss.mean()), float(growth)
    )


def leaks(engine: dict[str, Any], *, flushed: bool) -> list[str]:
    """What an idle engine still holds; after a flush everything is free."""
    free, cached, total = (engine[f"{name}_tokens"] for name in ("free", "cached", "total"))
    wrong = []
    if engine["running"] or engine["waiting"] or engine["used_tokens"]:
        wrong.append(
            f"idle, but {engine['running']} run, {engine['waiting']} wait, "
            f"{engine['used_tokens']} slots are in use"
        )
    if free + cached != total or engine["evictable_tokens"] != cached:
        wrong.append(
            f"{free} free and {cached} cached slots ({engine['evictable_tokens']} of them "
            f"evictable) of {total}"
        )
    if flushed and free != total:
        wrong.append(f"after a flush {free} of {total} slots are free")
    return wrong
