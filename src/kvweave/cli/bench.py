"""kvweave bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvweave.cli.flags import takes_settings
from kvweave.errors import ConfigError
from kvweave_bench.options import BenchOptions

_Name = Annotated[str | None, typer.Argument(help="Which benchmark; --list shows them.")]
_List = Annotated[bool, typer.Option("--list", help="Print the names and leave.")]
_Json = Annotated[Path | None, typer.Option("--json", help="File for the figures.", dir_okay=False)]


@takes_settings(options=BenchOptions)
def bench(
    options: BenchOptions, name: _Name = None, listed: _List = False, json: _Json = None
) -> None:
    """Measure, and print a table."""
    from kvweave_bench.registry import bench_names, run_bench  # here: they load torch

    if listed:
        typer.echo("\n".join(bench_names()))
        return
    if name is None:
        raise ConfigError([f"name a benchmark: {', '.join(bench_names())}"])
    run_bench(name, options, json_path=json)
