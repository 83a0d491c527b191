"""`python -m kvweave_bench.soak --minutes 30 --json out/soak.json`, or `make soak`.

Ends with status 1 if anything at all was wrong. Interrupted, it prints what it has.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console

from kvweave_bench.report import Report, Row, check_writable
from kvweave_bench.soak import model, oracle
from kvweave_bench.soak.report import problems_table, rows_of
from kvweave_bench.soak.variants import VARIANTS, Setting, SoakResult, run

MOST_GROWTH = 0.01
"""Of memory in the second half. The server keeps what it frees, so that it rises in rare steps."""


def main() -> int:
    """The command line."""
    given = _arguments()
    console, folder = Console(), Path(given.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if given.json is not None:
        check_writable(given.json)
    setting = Setting(
        model=folder / "model",
        folder=folder,
        seconds=60 * given.minutes,
        workers=given.workers,
        seed=given.seed,
        most_growth=given.most_growth,
        every=min(10.0, max(0.5, 60 * given.minutes / 60)),
        store=given.store,
    )
    model.save(setting.model, given.seed)
    for each in (signal.SIGINT, signal.SIGTERM):  # shells let what runs behind them ignore one
        signal.signal(each, signal.default_int_handler)
    outcomes: list[SoakResult] = []
    interrupted = False
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, oracle.load, (setting.model,)) as judges:
        try:
            for variant in given.arms:
                outcomes.append(SoakResult(variant))
                run(variant, setting, judges, outcomes[-1])
        except KeyboardInterrupt:
            interrupted = True
    rows: list[Row] = [row for outcome in outcomes for row in rows_of(outcome)]
    report = Report(bench="soak", model="random, 4 layers", seed=given.seed, rows=tuple(rows))
    report.print(console)
    if given.json is not None:
        report.write(given.json)
    wrong = sum(len(outcome.problems) for outcome in outcomes)
    if wrong:
        console.print(problems_table(outcomes))
    console.print(f"{wrong} problems" + (", interrupted" if interrupted else ""))
    return 1 if wrong or interrupted else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvweave_bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="for each of --arms")
    parser.add_argument(
        "--arms", nargs="+", choices=list(VARIANTS), default=["fuzzy_match", "radix"]
    )
    parser.add_argument("--workers", type=int, default=24, help="clients at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", default="out/soak", help="for logs, audits and the model")
    parser.add_argument("--store", action="store_true", help="with --kv-store, inside --folder")
    parser.add_argument("--most-growth", type=float, default=MOST_GROWTH, help="of memory, a share")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
