"""`kvweave info`, `check-model` and `store`: facts about the machine, a model, and stored KV."""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Iterable
from enum import Enum
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvweave.cli.chat import check_machine, loading_bar
from kvweave.cli.flags import takes_settings
from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig, ModelConfig
from kvweave.errors import ConfigError
from kvweave.plugins import choices_of
from kvweave.version import __version__

if TYPE_CHECKING:
    from kvweave.engine.selfcheck.measure import Measured


FAILED = 1
"""Exit code of check-model for a model that should be served with exact reuse only."""

_VECTORS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "i8mm", "bf16")
"""Instruction sets that make the kernels or torch faster, by Linux's names."""

_COLUMNS = ("texts", "n", "KL mean", "KL worst", "same top")
_FACTS = ("right cold", "warm", "misled")


@takes_settings(model=ModelConfig)
def info(model: ModelConfig) -> None:
    """Show versions, hardware and backends; with --model also what is known of that model."""
    check_machine(EngineConfig(model=model))
    facts = {
        "kvweave": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "processor": _processor(),
        "kernels": _kernels(),
        "prefix caches": ", ".join(choices_of("prefix-cache-backends")),
        "fuzzy providers": ", ".join(choices_of("fuzzy-providers")),
    }
    if model.model is None:
        facts["model"] = "the packaged one; --model shows facts about another"
    else:
        facts |= _loaded_facts(model)
    for name, value in facts.items():
        typer.echo(f"{name:<16} {value}")


def _processor() -> str:
    """Name, cores and vector instructions, read from Linux where this is Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    known = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    has = set(known.get("flags", "").split())
    name = known.get("model name") or platform.processor() or platform.machine()
    vectors = [flag for flag in _VECTORS if flag in has]
    return ", ".join([name, f"{os.cpu_count()} cores", *vectors])


def _kernels() -> str:
    library = files("kvweave").joinpath("kernels/_native.so")
    return "compiled" if library.is_file() else "not compiled: attention runs in plain torch"


def _loaded_facts(config: ModelConfig) -> dict[str, str]:
    # Imported here: torch and the models' code take seconds to load.
    import torch

    from kvweave.engine.attention import get_backend
    from kvweave.kv.tensors import KVTensors
    from kvweave.models import load_model

    with loading_bar() as progress:
        loaded = load_model(config, progress)
    attention = get_backend(config.attention_backend, loaded.device)
    per_token = KVTensors.bytes_per_slot(loaded.layouts, loaded.kv_dtype)
    fixed = [layout.fixed_because for layout in loaded.layouts if layout.rotary is None]
    return {
        "device": f"{loaded.device}, {torch.get_num_threads()} threads",
        "attention": f"{attention.name}, {_kernel(attention.name)}",
        "model": loaded.name,
        "from": loaded.path,
        "kind": f"{loaded.config.model_type}, {loaded.number_types}",
        "context": f"{loaded.context_length:,} tokens",
        "KV": f"{len(loaded.layouts)} layers, {_name(loaded.kv_dtype)} "
        f"({loaded.kv_dtype_because}), {per_token / 1024:,.1f} KiB per token",
        "KV can move": "yes" if not fixed else f"no: {fixed[0]}",
        "chat template": "yes" if loaded.tokenizer.chat_template else "no",
    }


def _kernel(backend: str) -> str:
    from kvweave import kernels

    if backend != "cpu":
        return "in torch"
    library = kernels.load()
    if library is None:
        return "in plain torch: there is no compiled kernel"
    return f"compiled kernel of level {library.level}, {library.path.name}"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@takes_settings(model=ModelConfig, fuzzy=FuzzyConfig)
def check_model(model: ModelConfig, fuzzy: FuzzyConfig) -> None:
    """Measure how far moved text changes a model's answers; exit code 1 if too far."""
    check_machine(EngineConfig(model=model, fuzzy=fuzzy))
    # Imported here: torch and the models' code take seconds to load.
    from kvweave.engine.selfcheck import gate
    from kvweave.engine.selfcheck.measure import quantization_cost
    from kvweave.models import load_model
    from kvweave.prefix.base import approximate_backends

    cache = CacheConfig(prefix_cache_backend=approximate_backends()[0])
    with loading_bar() as progress:
        loaded = load_model(model, progress)
        config = EngineConfig(model=model, cache=cache, fuzzy=fuzzy)
        check = gate.check_model(config, loaded, progress, afresh=True)
        cost = quantization_cost(model, loaded, progress)
    console = Console(highlight=False)
    if check.measured:
        console.print(_table(check.measured))
    if cost is not None:
        console.print(f"{cost}.", soft_wrap=True, markup=False)
    console.print(f"{check.sentence}.", soft_wrap=True, markup=False)
    if not check.passed:
        raise typer.Exit(FAILED)


def _table(measured: Iterable[Measured]) -> Table:
    """One row per kind of text, in the order of the first measurements."""
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
    """Prompts that gave their own fact, cold and warm, and prompts that were misled."""
    if measured[0].cold is None:
        return ("-",) * len(_FACTS)
    cold = sum(each.cold == "gold" for each in measured)
    warm = sum(each.warm == "gold" for each in measured)
    return str(cold), str(warm), str(sum(each.misled for each in measured))


DAMAGED = 1
"""Exit code of `verify` where something was damaged."""


class Action(str, Enum):
    """What to do with a folder."""

    INFO = "info"
    VERIFY = "verify"
    PURGE = "purge"


_Action = Annotated[Action, typer.Argument(help="info: count; verify: check; purge: delete.")]
_Folder = Annotated[Path, typer.Argument(help="The folder of --kv-store.")]


def store(action: _Action, folder: _Folder) -> None:
    """Show, check or empty a folder of --kv-store.

    verify reads every page and deletes damaged ones, unless a server uses the folder. purge deletes
    what no server uses.
    """
    from kvweave.store.pages import folders_in, purge  # imported here: it loads numpy

    try:
        found = folders_in(folder)
    except OSError as error:
        raise ConfigError([f"{folder} cannot be read: {error.strerror}"]) from None
    if not found:
        typer.echo(f"nothing is stored in {folder}")
    damaged = 0
    for each in found:
        if action is Action.PURGE:
            typer.echo(f"{each.name}  {'deleted' if purge(each) else 'kept: a server uses it'}")
        else:
            damaged += _show(each, verify=action is Action.VERIFY)
    if damaged:
        raise typer.Exit(DAMAGED)


def _show(folder: Path, *, verify: bool) -> int:
    """Print a line about one model's folder; returns how much of it was damaged."""
    from kvweave.store.pages import look_at

    try:
        facts = look_at(folder, verify=verify)
    except sqlite3.Error as error:
        typer.echo(
            f"{folder.name}  its catalogue is damaged ({error}): the next server starts anew"
        )
        return 1
    words = f"{facts.tokens:,} tokens in {facts.pages:,} pages, {facts.bytes / 1e9:.2f} GB"
    if facts.damaged is not None:
        fate = "not deleted while a server uses it" if facts.in_use else "deleted"
        words += f", {facts.damaged} damaged" + (f" ({fate})" if facts.damaged else "")
    typer.echo(f"{folder.name}  {words}{', in use' if facts.in_use else ''}")
    return facts.damaged or 0
