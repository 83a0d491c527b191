"""Fixtures for all tests: models, real and tiny. Everything runs on one thread per test."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvweave.models import LoadedModel

# Before transformers is imported: no test may wait for the hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests share few cores with each other and with whatever else the machine does."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random model, by its name in tinymodels.TINY or REFUSED."""
    from support.tinymodels import REFUSED, TINY, save

    @functools.cache
    def folder(name: str) -> Path:
        build = TINY.get(name) or REFUSED[name]
        return save(build(), tmp_path_factory.mktemp("models") / name)

    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """A loaded tiny model, by its name in tinymodels.TINY; loaded once for all tests."""
    from kvweave.config import ModelConfig
    from kvweave.models import load_model

    @functools.cache
    def load(name: str) -> LoadedModel:
        model = ModelConfig(model=str(tiny_folder(name)), device="cpu", dtype="float32")
        return load_model(model)

    return load


@pytest.fixture(scope="session")
def packaged() -> LoadedModel:
    """The packaged model, in float32 on the CPU, loaded once for all tests marked `model`."""
    from kvweave.config import ModelConfig
    from kvweave.models import load_model

    return load_model(ModelConfig(device="cpu", dtype="float32", quantization="none"))
