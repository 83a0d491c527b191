"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def donors_of_any_length_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of which little is read: random prompts have few others."""
    monkeypatch.setattr("kvweave.fuzzy.backend.worth_their_paths", lambda runs, nodes: list(runs))
