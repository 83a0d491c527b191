"""Settings of the model: which one, its number type, its device and its attention."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from kvweave.config.base import flag, positive

_DEVICES = ("auto", "cpu", "cuda", "xpu", "mps", "hpu", "npu", "mtia")
"""Kinds of torch devices that compute, and "auto"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, its number type, its device and its attention."""

    model: str | None = flag(
        None,
        "Folder, Hugging Face name or GGUF file; without it, the packaged SmolLM2-135M-Instruct.",
    )
    tokenizer: str | None = flag(
        None, "Folder or name of the tokenizer, when it is not the model's."
    )
    revision: str | None = flag(None, "Hub revision of the model.")
    served_model_name: str | None = flag(
        None, "Name that clients use, or several: a,b; the model's own without it."
    )
    dtype: str = flag(
        "auto",
        "Number type of arithmetic; on a CPU, auto takes the faster one for float weights.",
        choices=("auto", "float32", "bfloat16"),
    )
    quantization: str = flag(
        "auto",
        "Bits of linear layers' weights on a CPU; auto keeps those of a GGUF file.",
        choices=("auto", "none", "int8", "int4"),
    )
    kv_cache_dtype: str = flag(
        "auto",
        "Number type of KV: auto is bfloat16 beside quantised weights, else the type of the "
        "model's arithmetic; int8 holds nearly twice the tokens of bfloat16.",
        choices=("auto", "float32", "bfloat16", "int8"),
    )
    device: str = flag("auto", "Torch device: auto, cpu, cuda, cuda:1.")
    threads: int | None = flag(
        None,
        "Most CPU threads of a step; as many as there are cores without it. Steps use fewer while "
        "other processes need the cores.",
    )
    context_length: int | None = flag(
        None, "Longest prompt plus output; the model's own without it."
    )
    attention_backend: str = flag(
        "auto", "Implementation of attention.", choices=("auto", "cpu", "sdpa", "flashinfer")
    )
    chat_template: str | None = flag(
        None, "File with a Jinja chat template, instead of the model's."
    )

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that clients may use; the answers carry the first. Empty: the model's own."""
        names = map(str.strip, (self.served_model_name or "").split(","))
        return tuple(dict.fromkeys(filter(None, names)))

    def problems(self) -> list[str]:
        found = positive(self, "context_length", "threads")
        kind, _, number = self.device.partition(":")
        if kind not in _DEVICES or not (number.isdecimal() or kind == self.device):
            found.append(
                f"--device is one of {', '.join(_DEVICES)}, or one with a number as in cuda:1, "
                f"not {self.device!r}"
            )
        return found

    def missing(self) -> list[str]:
        """Problems of this machine, found without torch. Replicas may run on other machines."""
        found = []
        if self.model is not None and not Path(self.model).expanduser().exists():
            if names_a_path(self.model):
                found.append(f"there is no folder or GGUF file {self.model}")
            elif not _has_copy_of(self.model) and (reason := _hub_out_of_reach()):
                found.append(
                    f"{self.model} is no folder or GGUF file here, no copy of a hub model of that "
                    f"name is on this machine, and {reason}"
                )
        if self.device.startswith("cuda") and _lacks_cuda():
            found.append(f"--device {self.device} cannot be used: this machine has no GPU driver")
        return found


def names_a_path(model: str | None) -> bool:
    """True for a path of this machine, False for a name of the model hub."""
    return model is not None and (
        Path(model).is_absolute()
        or model.startswith((".", "~"))
        or model.count("/") > 1
        or model.endswith(".gguf")
    )


def _has_copy_of(name: str) -> bool:
    """Whether the hub's client has files of this model in its cache."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / (
        "huggingface"
    )
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    return (cache / f"models--{name.replace('/', '--')}").is_dir()


def _hub_out_of_reach() -> str | None:
    """Why the model hub cannot be asked; its client would try for a minute. None if it may answer.

    Behind a proxy, only the proxy knows.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE forbids to ask the model hub"
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    if getproxies() or host is None:
        return None
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        return f"the model hub {host} cannot be reached: {error.strerror or error}"
    return None


def _lacks_cuda() -> bool:
    """True if Linux has neither NVIDIA's driver nor AMD's, which torch calls cuda too."""
    if sys.platform != "linux" or Path("/dev/kfd").exists():
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False
