"""All benches by name, and how one is run."""

from __future__ import annotations

import importlib
from pathlib import Path

from rich.console import Console

from kvweave.errors import ConfigError
from kvweave_bench.base import Bench
from kvweave_bench.options import BENCHES, BenchOptions, check_name
from kvweave_bench.report import Report, check_writable, describe_machine
from kvweave_bench.setting import Setting


def get_bench(name: str) -> Bench:
    """A bench by name. Raises KvweaveError naming the known ones."""
    check_name(name)
    module = importlib.import_module(f"kvweave_bench.runs.{name.replace('-', '_')}")
    bench: Bench = module.BENCH
    return bench


def run_bench(
    name: str,
    options: BenchOptions | None = None,
    *,
    json_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Measure, print the table, write the file if one is wanted, and return the report.

    Raises KvweaveError (bad options, a text or model that cannot be had) before measuring.
    """
    bench, options = get_bench(name), options or BenchOptions()
    found = options.problems()
    for option in options.SPECIAL:
        if getattr(options, option) is not None and option not in bench.takes:
            found.append(f"--{option} means nothing to bench {name}")
    if found:
        raise ConfigError(found)
    if json_path is not None:
        check_writable(json_path)
    console = console or Console()
    n = options.n or (bench.quick_n if options.quick else bench.n)
    setting = Setting(options, n, console)
    console.print(f"{BENCHES[name]} ({setting.n} {bench.counts})", highlight=False)
    rows = bench.measure(setting)
    report = Report(
        bench=name,
        model=setting.model_name,
        seed=options.seed,
        rows=tuple(rows),
        machine=describe_machine() | {"texts": setting.text_origins},
    )
    report.print(console)
    if json_path is not None:
        report.write(json_path)
        console.print(f"written to {json_path}", highlight=False)
    return report
