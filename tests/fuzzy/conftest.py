"""Fixtures of the fuzzy tests."""

from __future__ import annotations

import pytest

from support.fuzzy_world import World


@pytest.fixture(params=[1, 4, 16], ids=lambda size: f"page{size}")
def world(request: pytest.FixtureRequest) -> World:
    return World(num_pages=2048 // request.param, page_size=request.param)
