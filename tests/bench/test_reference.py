"""The baseline: eviction from its cache, and the death of its process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvweave.errors import KvweaveError
from kvweave_bench.reference import Transformers, _Remote


def test_appended_and_decoded_tokens_are_forgotten(tiny_folder: Callable[[str], Path]) -> None:
    model = Transformers(str(tiny_folder("llama")), torch.float32, torch.device("cpu"))
    model.prefill(np.arange(20, dtype=np.int32))
    assert model._cache.get_seq_length() == 20
    assert model.append(np.arange(5, dtype=np.int32)) > 0
    assert model._cache.get_seq_length() == 20
    assert len(model.decode(3)) == 3
    assert model._cache.get_seq_length() == 20
    model.prefill(np.arange(7, dtype=np.int32))
    assert model._cache.get_seq_length() == 7


def test_a_dead_process_is_an_error_in_words() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(KvweaveError, match="the process that runs a baseline has died"):
        _Remote(ours).decode(1)
