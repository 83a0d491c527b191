"""Tests of the plug-in: everywhere on a fake of SGLang, and where SGLang is installed, on it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from support import fake_sglang

# `make test-sglang` makes an environment with SGLang in it, and runs these there.
collect_ignore = [] if find_spec("sglang") else ["real_sglang"]


@pytest.fixture
def sglang() -> Iterator[None]:
    """The fake stands in SGLang's place."""
    with fake_sglang.installed():
        yield
