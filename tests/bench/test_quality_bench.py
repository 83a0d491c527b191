"""bench quality from the options to the files, on a tiny model."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from kvweave.errors import ConfigError, KvweaveError
from kvweave_bench.options import BenchOptions
from kvweave_bench.quality import reworded
from kvweave_bench.registry import run_bench
from kvweave_bench.workloads.corpus import Corpus
from support.quality_texts import Letters, keep_texts


def test_rows_and_page_come_out_of_one_run(
    model: str, make_corpus: Callable[[int], Corpus], tmp_path: Path
) -> None:
    make_corpus(0)
    keep_texts(tmp_path)
    options = BenchOptions(
        model=model,
        n=1,
        quick=True,
        cells="moved,near-duplicate,rerun,unrelated",
        arms="copy/0,unrotated/0",
        html=str(tmp_path / "page.html"),
    )
    shown = io.StringIO()
    report = run_bench(
        "quality", options, json_path=tmp_path / "rows.json", console=Console(file=shown, width=200)
    )
    variants = {row.arm: row.n for row in report.rows if row.metric == "kl_mean"}
    assert variants == {
        "moved/copy/0": 1,
        "moved/unrotated/0": 1,
        "near-duplicate/copy/0": 5,
        "near-duplicate/unrotated/0": 5,
        "rerun/rerun/0": 1,
        "unrelated/copy/0": 9,
    }
    values = {(row.metric, row.arm): row.value for row in report.rows}
    assert values["token_identity", "moved/copy/0"] == 1
    assert values["reused_share", "moved/copy/0"] > 0.3
    assert values["fired", "unrelated/copy/0"] == 0
    assert values["kl_mean", "rerun/rerun/0"] < 1e-9
    assert json.loads((tmp_path / "rows.json").read_text())["bench"] == "quality"
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("</i>unrotated/0</th>") == 2
    assert "near-duplicate/copy/0" in shown.getvalue()


def test_a_session_reuses_more_of_its_turns_than_requests_without_a_key(
    model: str, make_corpus: Callable[[int], Corpus], tmp_path: Path
) -> None:
    make_corpus(0)
    keep_texts(tmp_path)
    options = BenchOptions(model=model, n=1, quick=True, cells="session-20")
    report = run_bench("quality", options, console=Console(file=io.StringIO()))
    rows = {(row.metric, row.arm): row for row in report.rows}
    keyed, without = "session-20/default", "session-20/default-no-key"
    turns = 2  # of three; the first reuses nothing
    assert {rows["reused_share", arm].n for arm in (keyed, without)} == {turns}
    least = "reused_share_least"
    assert rows[least, keyed].value > rows[least, without].value + 0.05
    assert rows["kl_mean", f"{keyed}/turn-2"].n == 1
    assert ("kl_mean", f"{keyed}/turn-5") not in rows
    speedup = rows["first_token_speedup", keyed]
    assert (speedup.baseline, speedup.ratio) == ("cold", speedup.value)


def test_other_words_are_measured_with_and_without_on_the_same_prompts(
    model: str,
    make_corpus: Callable[[int], Corpus],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_corpus(0)
    keep_texts(tmp_path)
    monkeypatch.setattr("kvweave.paraphrase.semantic.EmbedderProcess", lambda name: Letters())
    monkeypatch.setattr("kvweave.paraphrase.embedding_queue._QUIET", 0.02)
    # The model's tokens are bytes, of which a span is a few words: what is between two contractions
    # would be found word for word, and so their wordings differ in more than the facts gate passes.
    monkeypatch.setattr("kvweave.paraphrase.gate.differing", lambda donor, recipient: None)
    monkeypatch.setattr(reworded, "_TOLD", dict.fromkeys(reworded._TOLD, _TOLD))
    names = ["paraphrase-fact", "paraphrase-fact-moved", "paraphrase-fact-alone"]
    options = BenchOptions(model=model, n=2, quick=True, cells=",".join(names), arms="copy/0")
    report = run_bench("quality", options, console=Console(file=io.StringIO()))
    values = {(row.metric, row.arm.split("/")[0]): row.value for row in report.rows}
    whole, moved, alone = names
    assert [values["paraphrased", name] for name in names] == [1, 0, 1]
    assert values["reused_share", whole] == values["reused_share", alone]
    assert values["reused_share", moved] == pytest.approx(
        values["reused_share", whole] - values["paraphrased_share", whole]
    )
    # Against cold answers, and against those from what was only moved.
    assert 0 < values["kl_mean", alone] != values["kl_mean", whole]
    assert values["kl_mean", moved] > 0


_TOLD = (
    "In {name}, a quick taxi to {value} is usually cheap.",
    "In {name}, a fast cab to {value} is normally inexpensive.",
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cells": "moved,nothing"}, "cells are moved"),
        ({"arms": "copy/2"}, "budget of copy"),
        ({"html": "no/such/folder/page.html"}, "--html no/such"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(
    options: dict[str, str], words: str
) -> None:
    with pytest.raises(KvweaveError, match=words):
        run_bench("quality", BenchOptions(model="no such model", **options))  # type: ignore[arg-type]


def test_options_of_this_bench_mean_nothing_to_another() -> None:
    with pytest.raises(ConfigError, match="--html means nothing to bench moved"):
        run_bench("moved", BenchOptions(html="page.html"))
