"""Rows and the table of problems from the results of a soak."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvweave_bench.report import Row
from kvweave_bench.soak.variants import SoakResult

_SHOWN = 40
_COUNTS = {
    "requests": "requests",
    "answered": "answered",
    "fault": "failed_as_told",
    "left": "clients_left",
    "aborted": "aborted",
    "queue full": "queue_full",
    "refused": "refused",
    "answers judged": "answers_judged",
    "exact answers": "exact_answers",
    "exact tokens": "exact_tokens",
    "ties": "ties",
    "approximate answers": "approximate_answers",
    "approximate answers that differ": "approximate_differ",
    "approximate since they came back": "approximate_on_the_way",
    "audit:fault": "faults_injected",
    "audit:checked": "checks_of_pages",
    "audit:spans": "spans_compared",
    "audit:shared": "spans_shared",
}
_ENGINE = (
    *("steps", "preemptions", "healed", "heals_preempted", "heals_dropped"),
    *("evicted_tokens", "prefill_tokens", "generated_tokens"),
)


def rows_of(outcome: SoakResult) -> list[Row]:
    """What one variant did, how long it took, and how its memory went."""
    n = outcome.counts["requests"]

    def row(metric: str, value: float, unit: str, **spread: float) -> Row:
        return Row(metric=metric, arm=outcome.variant, value=value, unit=unit, n=n, **spread)  # type: ignore[arg-type]

    rows = [row("minutes", outcome.seconds / 60, "min")]
    rows += [row(name, outcome.counts[count], "") for count, name in _COUNTS.items()]
    rows += [row(name, outcome.engine[name], "") for name in _ENGINE if name in outcome.engine]
    if outcome.answer_seconds:
        low, middle, high = np.percentile(outcome.answer_seconds, (5, 50, 95)).tolist()
        rows.append(row("answer_seconds", middle, "s", p5=low, p95=high))
    if outcome.samples:
        for name, unit in (("rss", "MB"), ("files", ""), ("threads", "")):
            seen = [getattr(sample, name) for sample in outcome.samples]
            rows.append(row(name, seen[-1], unit, p5=float(min(seen)), p95=float(max(seen))))
    line = outcome.trend
    if line is not None:
        rows.append(row("rss_slope", line.slope, "MB/h", p5=line.low, p95=line.high))
        rows.append(row("rss_growth", 100 * line.growth, "%"))
    rows.append(row("problems", len(outcome.problems), ""))
    return rows


def problems_table(outcomes: Sequence[SoakResult]) -> Table:
    """The first of them."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("arm")
    table.add_column("what was wrong", overflow="fold")
    for outcome in outcomes:
        for problem in outcome.problems[:_SHOWN]:
            table.add_row(outcome.variant, problem)
    return table
