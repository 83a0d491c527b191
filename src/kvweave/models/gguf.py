"""GGUF files: dequantised once by transformers, kept as safetensors in the cache folder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvweave.errors import UnsupportedModelError, reason
from kvweave.models.cache import Progress, cache_folder, filled_once, no_library_bars, silent

_FORMAT = 1
"""Raised when what a converted folder holds changes, so that older ones are not taken for it."""


def converted_folder(name: str, fingerprint: str, dtype: torch.dtype) -> Path:
    """Where the conversion of the GGUF file with this content is kept, made or not yet."""
    number_type = str(dtype).removeprefix("torch.")
    return cache_folder() / "models" / f"{name}-{fingerprint[:16]}-{number_type}-{_FORMAT}"


def convert(file: Path, target: Path, dtype: torch.dtype, *, progress: Progress = silent) -> None:
    """Write a GGUF file's model and tokenizer into the folder `target`, unless it is there by then.

    Raises UnsupportedModelError for a file that transformers cannot read.
    """
    what = f"Converting {file.name}"
    progress(what, 0, 3)
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        progress(what, 1, 3)
        with no_library_bars():
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=dtype
            )
    except Exception as error:  # whatever a reader does with a broken or unknown file
        raise UnsupportedModelError(
            f"{file} cannot be read as a GGUF model: {reason(error)}"
        ) from error
    progress(what, 2, 3)
    # transformers takes its dequantised weights for quantised ones, and those it does not save.
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with no_library_bars(), filled_once(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    progress(what, 3, 3)
