"""Settings of replicas, and the error without Ray."""

from __future__ import annotations

import sys

import pytest

from kvweave.cli.main import _engines
from kvweave.config import ClusterConfig, EngineConfig, validate
from kvweave.errors import ConfigError


def test_impossible_values_are_named():
    with pytest.raises(ConfigError) as caught:
        validate(ClusterConfig(replicas=0, cpus_per_replica=-1.0, gpus_per_replica=-0.5))
    said = " ".join(caught.value.problems)
    assert len(caught.value.problems) == 3
    for flag in ("--replicas", "--cpus-per-replica", "--gpus-per-replica"):
        assert flag in said


def test_without_ray_the_error_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith("kvweave.cluster.")]:
        monkeypatch.delitem(sys.modules, name)
    with (
        pytest.raises(ConfigError, match=r"--replicas needs ray, which pip install '\.\[ray"),
        _engines(EngineConfig(), ClusterConfig(replicas=2)),
    ):
        pass
