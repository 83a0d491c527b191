"""Tests of the plug-in: everywhere on a fake of SGLang, and where SGLang is installed, on it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Any

import pytest
from packaging.requirements import Requirement

from support import fake_sglang

# `make test-sglang` makes an environment with SGLang in it, and runs these there.
collect_ignore = [] if find_spec("sglang") else ["real_sglang"]


@pytest.fixture
def sglang() -> Iterator[None]:
    """The fake stands in SGLang's place."""
    with fake_sglang.installed():
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was left out, and why."""
    if not find_spec("sglang"):
        terminalreporter.write_line(
            "left out: tests/integrations/real_sglang, since SGLang is not installed here; "
            "`make test-sglang` installs it and runs them"
        )
        return
    wanted = [Requirement(text) for text in requires("sglang") or []]
    missing = sorted({at.name for at in wanted if not at.marker and not _installed(at.name)})
    terminalreporter.write_line(
        "left out: everything that needs a GPU (streams, CUDA kernels, NCCL), and of SGLang's "
        f"requirements {', '.join(missing)}; docs/sglang.md says how to run it on a GPU"
    )


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
