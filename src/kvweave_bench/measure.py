"""Timing: variants take turns within one run, so a busy moment of the machine hits all alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvweave_bench.report import Row

Variant = Callable[[int], float]
"""Runs round i of one variant and returns its figure: seconds, or whatever the bench compares."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and the 5th and 95th percentile of `n` figures."""

    median: float
    p5: float
    p95: float
    n: int

    @staticmethod
    def of(figures: Sequence[float]) -> Spread:
        p5, median, p95 = np.percentile(np.asarray(figures, np.float64), (5, 50, 95))
        return Spread(float(median), float(p5), float(p95), len(figures))


@dataclass(frozen=True, slots=True)
class Against:
    """The variant that a row is compared with, round by round."""

    variant: str
    figures: Sequence[float]
    larger_is_better: bool = False


def row(
    metric: str, variant: str, figures: Sequence[float], unit: str, against: Against | None = None
) -> Row:
    """A row from all figures of one variant; its ratio pairs rounds (see `paired_ratios`)."""
    of = Spread.of(figures)
    return Row(
        metric=metric,
        arm=variant,
        value=of.median,
        unit=unit,
        n=of.n,
        p5=of.p5 if of.n > 1 else None,
        p95=of.p95 if of.n > 1 else None,
        baseline=against.variant if against else None,
        ratio=float(np.median(paired_ratios(figures, against))) if against else None,
    )


def ratio_row(metric: str, variant: str, figures: Sequence[float], against: Against) -> Row:
    """A row whose figures are the rounds' own ratios; see `paired_ratios`."""
    of = Spread.of(paired_ratios(figures, against))
    return Row(
        metric=metric,
        arm=variant,
        value=of.median,
        unit="x",
        n=of.n,
        p5=of.p5,
        p95=of.p95,
        baseline=against.variant,
        ratio=of.median,
    )


def paired_ratios(figures: Sequence[float], against: Against) -> list[float]:
    """Each round's ratio, better-is-larger; their median is what reports call ratio.

    Rounds are compared one by one because the machine's speed drifts over a long run: two medians,
    each from another minute, would compare minutes.
    """
    if len(figures) != len(against.figures):
        raise ValueError(f"{len(figures)} rounds cannot be paired with {len(against.figures)}")
    ours, theirs = np.asarray(figures, np.float64), np.asarray(against.figures, np.float64)
    ratios: list[float] = (ours / theirs if against.larger_is_better else theirs / ours).tolist()
    return ratios


def alternate(
    variants: Mapping[str, Variant],
    rounds: int,
    *,
    warm_up: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Run every variant once per round and return all figures; the first one changes per round.

    Warm-up rounds run first, numbered -1, -2, ..., and are thrown away: they pay for compilation,
    page faults and clock ramps. `progress` is called after every run, warm-up included.
    """
    names = list(variants)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for index in (*range(-1, -warm_up - 1, -1), *range(rounds)):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            figure = variants[name](index)
            if index >= 0:
                figures[name].append(figure)
            progress()
    return figures


def seconds(run: Callable[[], object]) -> float:
    """Wall-clock seconds of one call, the garbage collector kept out of it."""
    with quiet_collector():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Keep the garbage collector out of what is being timed; it catches up afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar of `total` steps; yields the function that advances it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
