"""Tests of choosing a provider by name, and of the example in the documentation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvweave import plugins
from kvweave.config import FuzzyConfig, validate
from kvweave.errors import ConfigError
from kvweave.fuzzy.anchors import SpanIndex
from kvweave.fuzzy.provider import create_provider
from kvweave.plugins import FUZZY_PROVIDERS
from support.fuzzy_world import SMALL, World, text

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_provider.py"


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that an installed package offers providers."""

    def offer(**values: str) -> None:
        points = [EntryPoint(name, value, FUZZY_PROVIDERS.group) for name, value in values.items()]
        monkeypatch.setattr(plugins, "entry_points", lambda group: points)

    return offer


def test_the_built_in_provider_is_the_default_and_always_there() -> None:
    assert FuzzyConfig().provider in FUZZY_PROVIDERS.names()
    assert isinstance(World().cache._guard._provider, SpanIndex)


def test_packages_offer_providers_by_name(offer: Callable[..., None]) -> None:
    offer(theirs="kvweave.fuzzy.anchors:SpanIndex", spans="not.there:Nothing")
    assert FUZZY_PROVIDERS.names() == ("spans", "semblend", "semantic", "theirs")
    validate(replace(SMALL, provider="theirs"))
    config = replace(SMALL, provider="theirs")
    assert World(config=config).serve(text(1, 40)).lease.plan.spans == ()


def test_an_unknown_name_is_refused_with_those_there_are(offer: Callable[..., None]) -> None:
    offer(theirs="kvweave.fuzzy.anchors:SpanIndex")
    with pytest.raises(
        ConfigError, match="no fuzzy provider 'other'; there are spans, semblend, semantic, theirs"
    ):
        create_provider("other", World().cache._donors, SMALL)
    with pytest.raises(
        ConfigError,
        match="--fuzzy-provider is one of spans, semblend, semantic, theirs, not 'other'",
    ):
        validate(replace(SMALL, provider="other"))


@pytest.mark.parametrize("value", ["not.there:Nothing", "kvweave.fuzzy.matcher:Nothing"])
def test_one_that_does_not_load_says_so(offer: Callable[..., None], value: str) -> None:
    offer(broken=value)
    with pytest.raises(ConfigError, match=r"'broken' does not start: .*(not|Nothing)"):
        World(config=replace(SMALL, provider="broken"))


def test_one_that_refuses_its_settings_is_heard(
    offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SpanIndex, *arguments: Any) -> None:
        raise ConfigError(["--fuzzy-stride is too odd"])

    monkeypatch.setattr(SpanIndex, "__init__", refuse)
    with pytest.raises(ConfigError, match=r"^--fuzzy-stride is too odd$"):
        World()


def test_the_example_in_the_documentation_serves_documents(
    offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("example_provider", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setitem(__import__("sys").modules, "example_provider", example)
    offer(marks="example_provider:Marks")
    world = World(128, 4, replace(SMALL, provider="marks"))
    world.check = lambda: world.cache.check([one.lease for one in world.live])  # type: ignore[method-assign]

    documents = [[example.MARK, *(np.array(text(seed, 50)) + 2).tolist()] for seed in range(3)]
    world.serve(text(10, 3) + documents[0] + documents[1] + documents[2])
    order = text(11, 8) + documents[2] + text(12, 5) + documents[0] + text(13, 4)
    running = world.start(order)
    assert [(s.start, s.donor_start) for s in running.lease.plan.spans] == [(8, 105), (64, 3)]
    assert running.lease.plan.served > 90
    world.check()
    world.finish(running)
    world.cache.evict(128)
    assert world.serve(order).lease.plan.spans == ()
    stats = world.cache.stats().provider
    assert (stats["raised"], stats["refused"]) == (0, 0)
