"""`kvweave info` and `kvweave check-model`: facts about a model and about this machine."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from kvweave.cli.flags import takes_settings
from kvweave.cli.session import check_machine, loading_bar
from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig, ModelConfig
from kvweave.plugins import choices_of
from kvweave.version import __version__

if TYPE_CHECKING:
    from kvweave.engine.selfcheck.measure import Measured

FAILED = 1
"""Exit code of check-model for a model that should be served with exact reuse only."""

_COLUMNS = ("texts", "n", "KL mean", "KL worst", "same top")
_FACTS = ("right cold", "warm", "misled")


@takes_settings(model=ModelConfig)
def info(model: ModelConfig) -> None:
    """Show versions, hardware, backends, and what is known of a model."""
    check_machine(EngineConfig(model=model))
    import torch  # imported here: it takes seconds
    import transformers

    from kvweave.engine.attention import get_backend
    from kvweave.models import load_model

    with loading_bar() as progress:
        loaded = load_model(model, progress)
    attention = get_backend(model.attention_backend, loaded.device)
    facts = {
        "kvweave": __version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "transformers": transformers.__version__,
        "device": _device(loaded.device),
        "attention": f"{attention.name}, {_kernel(attention.name)}",
        "prefix caches": ", ".join(choices_of("prefix-cache-backends")),
        "fuzzy providers": ", ".join(choices_of("fuzzy-providers")),
        **_model_facts(loaded),
    }
    for name, value in facts.items():
        typer.echo(f"{name:<16} {value}")


def _kernel(backend: str) -> str:
    from kvweave import kernels

    if backend != "cpu":
        return "in torch"
    library = kernels.load()
    if library is None:
        return "in plain torch: there is no compiled kernel"
    return f"compiled kernel of level {library.level}, {library.path.name}"


def _device(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return f"{device}, {torch.backends.cpu.get_cpu_capability()}"


def _model_facts(loaded: Any) -> dict[str, str]:
    from kvweave.kv.tensors import KVTensors

    per_token = KVTensors.bytes_per_slot(loaded.layouts, loaded.dtype)
    fixed = [layout.fixed_because for layout in loaded.layouts if layout.rotary is None]
    return {
        "model": loaded.name,
        "from": loaded.path,
        "kind": f"{loaded.config.model_type}, {str(loaded.dtype).removeprefix('torch.')}",
        "context": f"{loaded.context_length:,} tokens",
        "KV": f"{len(loaded.layouts)} layers, {per_token / 1024:,.1f} KiB per token",
        "KV can move": "yes" if not fixed else f"no: {fixed[0]}",
        "chat template": "yes" if loaded.tokenizer.chat_template else "no",
    }


@takes_settings(model=ModelConfig, fuzzy=FuzzyConfig)
def check_model(model: ModelConfig, fuzzy: FuzzyConfig) -> None:
    """Measure whether a model stands it that text moves; exit code 1 if it does not."""
    check_machine(EngineConfig(model=model, fuzzy=fuzzy))
    # Imported here: torch and the models' code take seconds to load.
    from kvweave.engine.selfcheck import gate
    from kvweave.models import load_model
    from kvweave.prefix.registry import approximate_backends

    cache = CacheConfig(prefix_cache_backend=approximate_backends()[0])
    with loading_bar() as progress:
        loaded = load_model(model, progress)
        config = EngineConfig(model=model, cache=cache, fuzzy=fuzzy)
        check = gate.check_model(config, loaded, progress, afresh=True)
    console = Console(highlight=False)
    if check.measured:
        console.print(_table(check.measured))
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
