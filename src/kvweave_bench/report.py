"""A bench's result: flat rows and the machine, written as a file and printed as a table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table

from kvweave.errors import KvweaveError
from kvweave.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. `value` is a median where several were taken, `n` how many, p5 and p95
    their spread.

    `ratio` compares with the variant named in `baseline`, and larger is always better: for a time
    it is baseline / value, for a throughput value / baseline. None where it does not apply.
    """

    metric: str
    arm: str
    value: float
    unit: str
    n: int
    p5: float | None = None
    p95: float | None = None
    baseline: str | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All rows of one run of one bench, and what they depend on beside the code.

    `machine` describes processor, threads and library versions; a bench that read third-party
    texts lists their versions there under "texts", since some of them cannot be pinned.
    """

    bench: str
    model: str | None
    seed: int
    rows: tuple[Row, ...]
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())
    version: str = __version__

    def to_json(self) -> str:
        """The report's file format; raises ValueError if a figure is not a number."""
        order = ("bench", "version", "model", "machine", "seed", "rows")
        whole = asdict(self)
        return json.dumps({key: whole[key] for key in order}, indent=1, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write the file as a whole or not at all."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(self.to_json(), encoding="utf-8")
        os.replace(partial, path)

    def print(self, console: Console) -> None:
        """Show the rows, and what one has to know to read them, as a table."""
        title = f"kvweave {self.version}, bench {self.bench}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for heading in ("metric", "arm", "value", "p5 to p95", "n", "ratio"):
            words = heading in ("metric", "arm")
            justify: JustifyMethod = "left" if words else "right"
            table.add_column(heading, justify=justify, overflow="fold")
        for row in self.rows:
            spread = "" if row.p5 is None else f"{_short(row.p5)} to {_short(row.p95)}"
            ratio = "" if row.ratio is None else f"{row.ratio:.3g}x {row.baseline}"
            value = f"{_short(row.value)} {row.unit}"
            table.add_row(row.metric, row.arm, value, spread, f"{row.n:,}", ratio)
        console.print(table)
        of = self.machine
        console.print(
            f"model {self.model or 'none'} · {of['cpu']}, {of['cores']} cores, "
            f"{of['threads']} threads · torch {of['torch']} · seed {self.seed}",
            highlight=False,
        )


def check_writable(path: Path, flag: str = "--json") -> None:
    """Refuse a report file that could not be written before an hour is spent on measuring."""
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise KvweaveError(f"{flag} {path}: no file can be written there")


def describe_machine() -> dict[str, Any]:
    """Processor, cores this process may use, threads torch uses, and versions."""
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": _usable_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        found["accelerator"] = torch.cuda.get_device_name()
    return found


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        lines: Sequence[str] = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown processor"


def _short(number: float | None) -> str:
    if number is None:
        return ""
    if float(number).is_integer() and abs(number) < 1e9:
        return f"{number:,.0f}"
    return f"{number:.3g}" if abs(number) < 100 else f"{number:,.0f}"
