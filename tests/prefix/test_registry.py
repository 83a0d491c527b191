"""Choosing a backend by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvweave.errors import ConfigError
from kvweave.kv.pool import PagePool
from kvweave.plugins import BACKENDS
from kvweave.prefix.base import create_cache
from kvweave.prefix.contract import CacheOptions
from support.prefix_world import RecordingMover


def test_every_name_makes_a_cache_of_that_name(backend: str) -> None:
    pool = PagePool(8, 2)
    cache = create_cache(backend, pool, CacheOptions(), RecordingMover())
    assert cache.name == backend
    assert cache.pool is pool
    assert cache.page_size == 2


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        create_cache("tree", PagePool(8, 2), CacheOptions())
    for name in BACKENDS:
        assert name in str(caught.value)


def test_exact_backends_need_no_torch_and_load_only_what_was_chosen() -> None:
    program = (
        "import sys\n"
        "from kvweave.kv.pool import PagePool\n"
        "from kvweave.prefix.contract import CacheOptions\n"
        "from kvweave.prefix.base import create_cache\n"
        "create_cache('hash', PagePool(8, 2), CacheOptions())\n"
        "assert 'kvweave.prefix.radix' not in sys.modules\n"
        "create_cache('radix', PagePool(8, 2), CacheOptions())\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
