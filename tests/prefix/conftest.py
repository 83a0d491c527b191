"""Worlds for every registered backend and the page sizes that matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

from kvweave.plugins import BACKENDS
from support.prefix_world import World

settings.register_profile("shared machine", deadline=None)  # how long a test takes proves nothing
settings.load_profile("shared machine")

PAGE_SIZES = (1, 16, 128)


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[name for name in BACKENDS if name != "none"])
def keeping(request: pytest.FixtureRequest) -> str:
    """A backend that keeps something."""
    return str(request.param)


@pytest.fixture(params=PAGE_SIZES, ids=lambda size: f"page{size}")
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def world(backend: str, page_size: int) -> World:
    return World(backend, page_size)


@pytest.fixture
def cache_world(keeping: str, page_size: int) -> Callable[..., World]:
    """Makes worlds whose backend keeps something."""

    def make(num_pages: int = 64, **options: Any) -> World:
        return World(keeping, page_size, num_pages, **options)

    return make
