"""The bench of the paraphrase gate, on a handful of pairs and with an embedder of letters."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from kvweave.bench.base import BenchOptions
from kvweave.bench.registry import run_bench
from kvweave.bench.runs import paraphrase_gate

PAIRS = [
    ("negation", "Cancel my plan today.", "Don't cancel my plan today."),
    ("number_date", "Track order 48213.", "Track order 48231."),
    ("paraphrase", "How do I cancel my plan?", "How can I cancel my plan?"),
    ("near_repeat", "Track order 48213.", "track order 48213"),
    ("near_repeat", "Is it open on Monday?", "xyz"),
]


class Letters:
    """Directions by how often each letter occurs."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        counts = np.array(
            [[text.lower().count(chr(97 + at)) for at in range(26)] for text in texts], np.float32
        )
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def test_each_gate_is_counted_on_the_same_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWEAVE_CACHE", str(tmp_path))
    (tmp_path / "texts").mkdir()
    texts = [
        {"title": str(at), "body": one, "facts": {"other": other, "category": kind}}
        for at, (kind, one, other) in enumerate(PAIRS)
    ]
    kept = {"source": "fow-cache", "origin": "fow-cache 0", "licence": "test", "texts": texts}
    (tmp_path / "texts" / "fow-cache.json").write_text(json.dumps(kept))
    monkeypatch.setattr(paraphrase_gate, "make_embedder", lambda name: Letters())
    report = run_bench("paraphrase-gate", BenchOptions(), console=Console(file=io.StringIO()))
    found = {(row.metric, row.arm): (row.value, row.n) for row in report.rows}
    assert found["false_serves", "cosine"] == (2, 2)
    assert found["false_serves", "facts"] == (0, 2)
    assert found["paraphrases_served", "facts"] == (1, 1)
    assert found["near_repeats_served", "cosine"] == (1, 2)
    assert found["near_repeats_served", "facts"] == (1, 2)
    assert found["false_serves", "cosine, none false"] == (0, 2)
    assert found["microseconds_per_pair", "facts"][1] == 5 * len(PAIRS)
    assert report.machine["texts"] == {"fow-cache": "fow-cache 0"}
    assert report.model is None
