"""kvweave check-model: the self-check of moved text, on its own."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from kvweave.cli.flags import takes_settings
from kvweave.cli.session import loading_bar
from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig, ModelConfig

if TYPE_CHECKING:
    from kvweave.engine.selfcheck.measure import Measured

FAILED = 1
"""Exit code where the model had better be served with exact reuse."""

_COLUMNS = ("texts", "n", "KL mean", "KL worst", "same top")
_FACTS = ("right cold", "warm", "misled")


@takes_settings(model=ModelConfig, fuzzy=FuzzyConfig)
def check_model(model: ModelConfig, fuzzy: FuzzyConfig) -> None:
    """Measure whether a model stands it that text moves; exit code 1 if it does not."""
    # Here: they load torch and the models' code, which takes seconds.
    from kvweave.engine.selfcheck.gate import check_model
    from kvweave.models import load_model
    from kvweave.prefix.registry import approximate_backends

    cache = CacheConfig(prefix_cache_backend=approximate_backends()[0])
    with loading_bar() as progress:
        loaded = load_model(model, progress)
        config = EngineConfig(model=model, cache=cache, fuzzy=fuzzy)
        check = check_model(config, loaded, progress, afresh=True)
    console = Console(highlight=False)
    if check.measured:
        console.print(_table(check.measured))
    console.print(f"{check.sentence}.", soft_wrap=True, markup=False)
    if not check.passed:
        raise typer.Exit(FAILED)


def _table(measured: Iterable[Measured]) -> Table:
    """One row per kind of text, in the order in which they were first measured."""
    kinds: dict[str, list[Measured]] = {}
    for each in measured:
        kinds.setdefault(each.kind, []).append(each)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (*_COLUMNS, *_FACTS):
        left = heading == _COLUMNS[0]
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for kind, some in kinds.items():
        divergences = [each.kl for each in some]
        table.add_row(
            kind,
            str(len(some)),
            f"{fmean(divergences):.4f}",
            f"{max(divergences):.4f}",
            f"{sum(each.same_top for each in some)}",
            *_facts(some),
        )
    return table


def _facts(measured: list[Measured]) -> tuple[str, ...]:
    """How many gave their own fact, cold and warm, and how many were misled."""
    if measured[0].cold is None:
        return ("-",) * len(_FACTS)
    cold = sum(each.cold == "gold" for each in measured)
    warm = sum(each.warm == "gold" for each in measured)
    return str(cold), str(warm), str(sum(each.misled for each in measured))
