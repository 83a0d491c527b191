"""How much memory a device could still give, files that the system caches not counted as used."""

from __future__ import annotations

import os
from pathlib import Path

import torch


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
