"""Retention: KV of sessions outlives floods of other prompts, within a share of the pool."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvweave.config import FuzzyConfig
from kvweave.kv.journal import Journal
from kvweave.prefix.eviction import Retention
from support.enginekit import make_world as make_engine
from support.enginekit import oracle_answer, prompt, request
from support.prefix_world import Chaos, World, text

BACKENDS = ("hash", "radix", "fuzzy_match")


def world(backend: str, share: float = 0.5, pages: int = 64) -> World:
    return World(backend, 4, pages, retention_share=share)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flood_of_other_prompts_does_not_evict_what_is_retained(backend: str):
    at = world(backend)
    kept = text(20, 4, seed=1)
    at.serve(kept, retain_seconds=60.0)
    for seed in range(2, 60):
        at.serve(text(7.5, 4, seed=seed), fuzzy=False)
        at.check()
    assert at.match(np.append(kept, 0)) == 80
    at.evict(64)  # nothing is protected for good
    assert at.cache.cached_pages == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_more_than_its_share_is_retained(backend: str):
    at = world(backend, share=0.25)
    for seed in range(1, 4):
        at.serve(text(10, 4, seed=seed), retain_seconds=60.0)
    at.check()
    for seed in range(10, 60):
        at.serve(text(7.5, 4, seed=seed), fuzzy=False)
    found = [at.match(np.append(text(10, 4, seed=seed), 0)) // 4 for seed in range(1, 4)]
    assert found[0] == 0
    assert found[2] == 10  # the newest
    assert sum(found) <= 16


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_a_longer_path_its_beginning_is_retained(backend: str):
    at = world(backend, share=0.25)
    long = text(30, 4, seed=1)
    at.serve(long, retain_seconds=60.0)
    at.check()
    for seed in range(10, 60):
        at.serve(text(7.5, 4, seed=seed), fuzzy=False)
    assert at.match(np.append(long, 0)) == 64
    at.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_retention_ends(backend: str, monkeypatch: pytest.MonkeyPatch):
    at, now = world(backend), [0.0]
    keeper: Any = at.cache
    holder = keeper.index if backend == "hash" else keeper.tree
    monkeypatch.setattr(holder._retention, "_clock", lambda: now[0])
    kept = text(10, 4, seed=1)
    at.serve(kept, retain_seconds=60.0)
    now[0] = 61.0
    for seed in range(10, 30):
        at.serve(text(7.5, 4, seed=seed), fuzzy=False)
    assert at.match(np.append(kept, 0)) == 0
    at.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_share_nothing_is_retained(backend: str):
    at = world(backend, share=0.0)
    kept = text(10, 4, seed=1)
    at.serve(kept, retain_seconds=60.0)
    for seed in range(10, 30):
        at.serve(text(7.5, 4, seed=seed), fuzzy=False)
    assert at.match(np.append(kept, 0)) == 0


class RetainingChaos(Chaos):
    """Some requests are retained, for a moment or for long."""

    def view(self, *, fuzzy: bool) -> Any:
        from dataclasses import replace

        seconds = float(self.rng.choice([0.0, 1e-4, 60.0]))
        return replace(super().view(fuzzy=fuzzy), retain_seconds=seconds)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(3))
def test_everything_adds_up_whatever_is_retained(backend: str, seed: int):
    fuzzy = FuzzyConfig(stride=4, min_span=8, max_share=0.0)
    at = World(backend, 4, 40, retention_share=0.4, fuzzy=fuzzy)
    chaos = RetainingChaos(at, np.random.default_rng(seed))
    for _ in range(250):
        chaos.step()


def test_an_undone_operation_retains_what_was_retained():
    journal, queued = Journal(), []
    kept: Retention[str] = Retention(journal, 2, lambda item: 1, queued.append, lambda: 0.0)
    kept.hold(["a", "b"], 10.0)
    journal.begin()
    kept.hold(["c"], 10.0)
    assert queued == ["a"]
    journal.undo()
    assert [bool(kept.rank(item)) for item in "abc"] == [True, True, False]
    assert kept._soonest < math.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flood_through_the_engine_leaves_a_session_and_ends(backend: str):
    """As a public report has it: thousands of unrelated prompts against one long prefix."""
    at = make_engine(backend, pool_tokens=2048, retention_share=0.6, max_running_requests=8)
    prefix = prompt(1080, seed=1)
    from dataclasses import replace

    at.run(replace(request("kept", prefix, 2), retain_seconds=600.0), check=False)
    flood = [request(f"f{seed}", prompt(24, seed=seed), 1) for seed in range(2, 580)]
    at.run(*flood, check=False)
    at.run(request("again", prefix + prompt(5, seed=999), 4), check=False)
    assert at.answers["again", 0].usage.cached_tokens == 1080
    assert at.ids("again") == oracle_answer(prefix + prompt(5, seed=999), 4)
    at.assert_idle()
