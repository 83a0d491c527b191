"""Engines of enginekit whose KV is kept on disk: a page's bytes are its tokens and positions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.engine.engine import Engine
from kvweave.kv.pool import IntArray
from kvweave.store.offloader import Offloader
from kvweave.store.pages import PageFormat, PageStore
from support.enginekit import OracleRunner, World, make_world

PAGE_SIZE = 4
PAGE_BYTES = 16 * PAGE_SIZE
FUZZY = FuzzyConfig(stride=4, min_span=8, min_suffix=1, refresh_tokens=0)


class OracleContent:
    """The content of an OracleRunner's pages."""

    page_bytes = PAGE_BYTES

    def __init__(self, runner: OracleRunner) -> None:
        self._parts = [
            part.reshape(-1, PAGE_SIZE).view(np.uint8) for part in (runner.tokens, runner.positions)
        ]

    def copy_out(self, pages: IntArray, out: Any = None) -> Any:
        data = np.concatenate([part[pages] for part in self._parts], axis=1)
        if out is None:
            return data
        out[:] = data
        return out

    def copy_in(self, pages: IntArray, data: Any) -> None:
        half = PAGE_BYTES // 2
        self._parts[0][pages], self._parts[1][pages] = data[:, :half], data[:, half:]


def stored_world(
    folder: Path,
    backend: str = "radix",
    *,
    identity: str = "oracle",
    most_bytes: int = 1 << 20,
    least_tokens: int = 8,
    fuzzy: FuzzyConfig = FUZZY,
    **more: Any,
) -> World:
    """As `make_world`, with a store in `folder`."""
    world = make_world(backend, page_size=PAGE_SIZE, fuzzy=fuzzy, **more)
    components = world.engine.components
    store = PageStore(folder, PageFormat(identity, PAGE_SIZE, PAGE_BYTES, "o"), most_bytes)
    offloader = Offloader(
        components.cache,
        OracleContent(world.runner),
        store,
        stride=fuzzy.stride,
        shortest_span=fuzzy.min_span if backend == "fuzzy_match" else None,
        least_tokens=least_tokens,
        patience=60.0,
    )
    components = replace(components, store=offloader)
    world.engine = Engine(world.engine.config, world.engine.loaded, components)
    return world


def settle(world: World) -> None:
    """Save what is still to be saved."""
    store = world.engine.components.store
    assert store is not None
    for _ in range(2000):
        if not world.engine.heal() and not store.saving:
            return
        store.wait(0.01)
    raise AssertionError("saving does not come to an end")
