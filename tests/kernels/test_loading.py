"""The compiled library: found where it was built, one OpenMP with torch, and missed gracefully."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvweave import kernels
from kvweave.engine.attention.cpu import CpuAttention


def test_the_library_was_built_here() -> None:
    library = kernels.load()
    assert library is not None
    assert library.path.parent == Path(kernels.__file__).parent


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_kernels_and_torch_share_one_openmp() -> None:
    kernels.load()
    torch.randn(300, 300) @ torch.randn(300, 300)
    names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    runtimes = {name for name in names if "libgomp" in name or "libomp" in name}
    ours = {name for name in runtimes if str(Path(torch.__file__).parent) in name}
    # torch's own wheel brings a runtime; where it brings none, both use the system's.
    assert len(ours or runtimes) == 1
    assert "torch" in next(iter(runtimes)) or len(runtimes) == 1


def test_a_missing_library_is_told_once_and_torch_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels.load.cache_clear()
    monkeypatch.setattr(kernels, "LIBRARY", Path("/no/such/library.so"))
    with caplog.at_level(logging.WARNING, logger="kvweave.kernels"):
        for _ in range(2):
            CpuAttention()
    kernels.load.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "The compiled CPU kernels cannot be used (they were not built: no C compiler was found): "
        "attention on CPUs and moving KV run in plain torch, several times slower."
    ]


def test_a_library_built_from_other_sources_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "old.c"
    source.write_text("long long kvweave_sizes(void) { return 1; }")
    built = tmp_path / "old.so"
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", built], check=True)
    with pytest.raises(OSError, match="install kvweave again"):
        kernels.Library(built)
