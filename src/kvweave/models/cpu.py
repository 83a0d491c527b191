"""Speeds up transformers models on a CPU without a change to their code.

Weights are packed once for oneDNN's matrix products. On a machine whose vendor MKL does not favour,
these run more than twice as fast as torch's own `linear`, and elsewhere as fast. And freed
memory stays in the process: glibc otherwise gives large blocks back to the system and gets them
again page by page, in every layer, which costs more than the arithmetic done in them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional


def free_bytes(device: torch.device, *, root: Path = Path("/")) -> int:
    """Free memory in bytes: of a graphics card, or of this machine or container.

    `root` is where /proc and /sys are looked for.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    machine = _available(root / "proc/meminfo")
    container = _allowed(root / "sys/fs/cgroup")
    return machine if container is None else min(machine, container)


def _available(meminfo: Path) -> int:
    """Linux's own estimate; where there is none, half of the machine."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _allowed(group: Path) -> int | None:
    """What a container (cgroup v2) may still take; None without a limit."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        lines = (group / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no container, or the limit is "max"
        return None
    cached = sum(int(n) for name, n in map(str.split, lines) if name.endswith("active_file"))
    return max(0, limit - used + cached)


_DTYPES = (torch.float32, torch.bfloat16)

# Of glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


class PackedLinear(nn.Module):
    """`nn.Linear` for inference, its weight in oneDNN's own layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # Not a parameter or buffer: torch cannot move or save this layout.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight, unpacked for model code that asks for it."""
        dense: torch.Tensor = self._packed.to_dense()
        return dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return product


def pack_weights(model: nn.Module) -> int:
    """Replace every plain `nn.Linear` of `model` by a PackedLinear; returns how many.

    None are replaced where torch's build has no oneDNN, or its product differs from torch's own.
    """
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype in _DTYPES
    ]
    if not places or not _packing_works(getattr(*places[0])):
        return 0
    for parent, name in places:
        # One at a time, and nothing else holds the plain weight: a model is never there twice.
        setattr(parent, name, PackedLinear(getattr(parent, name)))
    return len(places)


def _packing_works(sample: nn.Linear) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    x = torch.linspace(-1, 1, 3 * sample.in_features, dtype=sample.weight.dtype)
    x = x.view(3, sample.in_features)
    try:
        packed = PackedLinear(sample)(x)
    except (AttributeError, RuntimeError):  # private operators: a build may lack them
        return False
    expected = functional.linear(x, sample.weight, sample.bias)
    return bool((packed - expected).norm() <= 1e-2 * expected.norm())


_CLEARLY = 1.1
"""Times by which bfloat16 must be faster: neither noise nor nothing decides."""
_SAMPLE = 768, 2048
"""Inputs and outputs of the layer that is measured."""
_ROWS, _REPEATS = (1, 128), 7
_BFLOAT16_PRODUCTS = {
    "AMX": "_is_amx_tile_supported",
    "AVX512-BF16": "_is_avx512_bf16_supported",
}
"""Instruction sets, and what of torch.cpu tells whether they are there."""


@functools.cache
def faster_dtype() -> tuple[torch.dtype, str]:
    """The number type in which this processor multiplies matrices faster, and why it is that.

    The processor is asked first. Where it has products of bfloat16, one layer is measured, for one
    row and for many, once per process (some 20 ms).
    """
    known = [
        name for name, probe in _BFLOAT16_PRODUCTS.items() if getattr(torch.cpu, probe, bool)()
    ]
    if not known:
        return torch.float32, "this processor has no products of bfloat16"
    speedup = min(_speedups())
    measured = f"bfloat16 is {speedup:.1f} times as fast as float32 here ({known[0]})"
    return torch.bfloat16 if speedup >= _CLEARLY else torch.float32, measured


@torch.inference_mode()
def _speedups() -> list[float]:
    """How many times faster bfloat16 is than float32, for each number of rows."""
    layers = [PackedLinear(nn.Linear(*_SAMPLE, bias=False, dtype=dtype)) for dtype in _DTYPES]
    found = []
    for rows in _ROWS:
        inputs = [torch.ones(rows, _SAMPLE[0], dtype=dtype) for dtype in _DTYPES]
        least = [float("inf"), float("inf")]
        for _ in range(_REPEATS):  # in turns, the shortest of each: others may use the cores, too
            for at, layer in enumerate(layers):
                begin = time.perf_counter()
                layer(inputs[at])
                least[at] = min(least[at], time.perf_counter() - begin)
        found.append(least[0] / least[1])
    return found


def keep_freed_memory() -> bool:
    """Tell glibc, for the whole process, not to give freed blocks back; False without glibc.

    Blocks of more than a gigabyte (KV pools, embeddings) still come and go on their own.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # One arena: a second one cannot grow blocks beyond 64 MiB, and does give them back.
    kept = [mallopt(_M_MMAP_THRESHOLD, 1 << 30), mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)]
    return all([*kept, mallopt(_M_ARENA_MAX, 1)])
