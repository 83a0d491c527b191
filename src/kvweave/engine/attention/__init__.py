"""Chooses the attention backend; the backends read and write the paged KV pool."""

from __future__ import annotations

import importlib.util

import torch

from kvweave.engine.attention.base import AttentionBackend, AttentionBatch, LayerCall
from kvweave.errors import ConfigError, extra

__all__ = ["AttentionBackend", "AttentionBatch", "LayerCall", "get_backend"]


def get_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """The backend that `--attention-backend name` asks for, for tensors on `device`.

    `auto` is `cpu` on a CPU, `flashinfer` on CUDA where it is installed, `sdpa` elsewhere.
    Raises ConfigError if the two do not go together.
    """
    kind = torch.device(device).type
    if name == "auto":
        name = _best(kind)
    if name == "sdpa":
        from kvweave.engine.attention.sdpa import GatheredAttention

        return GatheredAttention()
    if name == "cpu":
        if kind != "cpu":
            raise ConfigError([f"--attention-backend cpu needs --device cpu, not {kind}"])
        from kvweave.engine.attention.cpu import CpuAttention

        return CpuAttention()
    if name == "flashinfer":
        if kind != "cuda":
            raise ConfigError([f"--attention-backend flashinfer needs --device cuda, not {kind}"])
        if not _has_flashinfer():
            raise ConfigError(
                [f"--attention-backend flashinfer needs a package: {extra('flashinfer')}"]
            )
        from kvweave.engine.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(device)
    raise ConfigError([f"--attention-backend knows no {name!r}"])


def _best(kind: str) -> str:
    if kind == "cpu":
        return "cpu"
    return "flashinfer" if kind == "cuda" and _has_flashinfer() else "sdpa"


def _has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None
