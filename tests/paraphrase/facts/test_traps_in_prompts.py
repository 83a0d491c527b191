"""The traps as prompts, through engine, span index, semantic provider and plan, in both orders."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from kvweave.config import FuzzyConfig
from kvweave.models import LoadedModel
from kvweave.paraphrase.facts import differing
from kvweave_bench.in_prompts import Pair, served_in_prompts
from kvweave_bench.options import BenchOptions
from kvweave_bench.setting import Setting
from support.traps import TRAPS

pytestmark = pytest.mark.model

SAME = (
    ("We've got the new tickets, and we don't need the old ones for it.",
     "We have got the new tickets, and we do not need the old ones for it."),
    ("There were twenty-one guests, and they had ten children with them.",
     "There were 21 guests, and they had 10 children with them."),
)  # fmt: skip
"""They show that what is refused below would have come as far as the gate."""


class Letters:
    """Directions by how often each letter occurs, which anagrams and near misses share."""

    def encode(self, texts: list[str]) -> np.ndarray:
        counts = [[text.lower().count(chr(97 + at)) for at in range(26)] for text in texts]
        found = np.array(counts, np.float32) + 0.01
        return found / np.linalg.norm(found, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("config", "judged"),
    [
        (FuzzyConfig(), 15),
        (FuzzyConfig(semantic_min_span=1, semantic_threshold=0.1), 80),
    ],
    ids=["defaults", "any length"],
)
def test_no_trap_is_served(
    packaged: LoadedModel, monkeypatch: pytest.MonkeyPatch, config: FuzzyConfig, judged: int
) -> None:
    monkeypatch.setattr("kvweave.paraphrase.semantic.EmbedderProcess", lambda name: Letters())
    monkeypatch.setattr("kvweave.paraphrase.embedding_queue._QUIET", 0.02)
    setting = Setting(BenchOptions(), 0, Console(file=io.StringIO()))
    setting.loaded = packaged
    pairs = [Pair(*both, "same", False) for both in SAME]
    pairs += [Pair(donor, recipient, kind, False) for kind, donor, recipient in TRAPS]
    gates = {"all": lambda donor, recipient: None, "facts": differing}
    served = served_in_prompts(setting, pairs, gates, config)
    accepted = [pair for pair, tokens in zip(pairs, served["facts"], strict=True) if tokens]
    assert accepted == pairs[: len(SAME)]
    # Many of them get as far as the gate, and would be served without it.
    assert sum(tokens > 0 for tokens in served["all"][len(SAME) :]) >= judged
