"""The bench of the paraphrase gate, on a handful of pairs and with an embedder of letters."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvweave_bench.options import BenchOptions
from kvweave_bench.registry import run_bench
from kvweave_bench.runs import paraphrase_gate
from support.quality_texts import Letters

PAIRS = [
    ("negation", "Cancel my plan today.", "Don't cancel my plan today."),
    ("number_date", "Track order 48213.", "Track order 48231."),
    ("paraphrase", "There were twenty guests.", "There were 20 guests."),
    ("near_repeat", "They don't take it if I'm late.", "They do not take it if I am late."),
    ("near_repeat", "Is it open on Monday?", "xyz"),
    ("paraphrase", "We don't want it if they don't work.",
     "We do not want it if they do not work."),
    ("paraphrase", "Which vacation is cheaper?", "Which holiday is cheaper?"),
    ("entity_swap", "Does the bus to Berlin stop here?", "Does the bus to Vienna stop here?"),
]  # fmt: skip


def test_each_gate_is_counted_on_the_same_pairs(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr("kvweave.paraphrase.semantic.EmbedderProcess", lambda name: Letters())
    monkeypatch.setattr("kvweave.paraphrase.embedding_queue._QUIET", 0.02)
    options = BenchOptions(model=model)
    report = run_bench("paraphrase-gate", options, console=Console(file=io.StringIO()))
    found = {(row.metric, row.arm): (row.value, row.n) for row in report.rows}
    assert found["false_serves", "cosine"] == (3, 3)
    assert found["false_serves", "facts"] == (0, 3)
    assert found["paraphrases_served", "facts"] == (2, 3)
    assert found["near_repeats_served", "cosine"] == (1, 2)
    assert found["near_repeats_served", "facts"] == (1, 2)
    assert found["false_serves", "cosine, none false"] == (0, 3)
    # As prompts, only what differs in four tokens or more, whichever is the donor's; here, a token
    # is a letter.
    assert found["false_serves_in_prompts", "cosine"] == (1, 3)
    assert found["false_serves_in_prompts", "facts"] == (0, 3)
    assert found["paraphrases_served_in_prompts", "facts"] == (1, 3)
    assert found["near_repeats_served_in_prompts", "facts"] == (1, 2)
    read = ("n't take it if I'", "n't want it if they don'")
    assert found["tokens_in_prompts", "facts"] == (sum(map(len, read)) / 2, 2)
    # However few they are.
    assert found["false_serves_in_prompts_any_length", "cosine"] == (3, 3)
    assert found["false_serves_in_prompts_any_length", "facts"] == (0, 3)
    assert found["paraphrases_served_in_prompts_any_length", "facts"] == (2, 3)
    assert found["microseconds_per_pair", "facts"][1] == 5 * len(PAIRS)
    assert report.machine["texts"] == {"fow-cache": "fow-cache 0"}
