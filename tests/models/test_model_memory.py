"""Free memory, of machines and containers."""

from __future__ import annotations

from pathlib import Path

import torch

from kvweave.models.cpu import free_bytes

CPU = torch.device("cpu")


def machine(root: Path, available_kib: int) -> None:
    (root / "proc").mkdir()
    (root / "proc" / "meminfo").write_text(
        f"MemTotal: 99999 kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\n"
    )


def container(root: Path, limit: str, current: int, stat: str) -> None:
    group = root / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(limit + "\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(stat)


def test_cached_files_do_not_count_as_used(tmp_path: Path) -> None:
    machine(tmp_path, 5000)
    assert free_bytes(CPU, root=tmp_path) == 5000 * 1024
    container(tmp_path, "1000", 900, "anon 100\ninactive_file 500\nactive_file 200\n")
    assert free_bytes(CPU, root=tmp_path) == 1000 - 900 + 700


def test_a_container_without_a_limit_has_what_the_machine_has(tmp_path: Path) -> None:
    machine(tmp_path, 5000)
    container(tmp_path, "max", 900, "anon 100\n")
    assert free_bytes(CPU, root=tmp_path) == 5000 * 1024


def test_a_container_cannot_have_more_than_the_machine(tmp_path: Path) -> None:
    machine(tmp_path, 1)
    container(tmp_path, "1000000", 0, "")
    assert free_bytes(CPU, root=tmp_path) == 1024


def test_a_full_container_has_nothing_left(tmp_path: Path) -> None:
    machine(tmp_path, 5000)
    container(tmp_path, "1000", 1100, "inactive_file 50\n")
    assert free_bytes(CPU, root=tmp_path) == 0


def test_without_proc_half_of_the_machine_is_assumed(tmp_path: Path) -> None:
    assert free_bytes(CPU, root=tmp_path) > 2**20
