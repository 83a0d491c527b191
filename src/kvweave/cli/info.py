"""kvweave info."""

from __future__ import annotations

import platform
from typing import Any

import typer

from kvweave.cli.flags import takes_settings
from kvweave.cli.session import loading_bar
from kvweave.config import ModelConfig
from kvweave.plugins import choices_of
from kvweave.version import __version__


@takes_settings(model=ModelConfig)
def info(model: ModelConfig) -> None:
    """Show versions, hardware, backends, and what is known of a model."""
    import torch  # here: it takes a second
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
