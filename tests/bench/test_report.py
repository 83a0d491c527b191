"""Reports: the file's format, and the arithmetic behind a row."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from kvweave.errors import KvweaveError
from kvweave_bench.measure import Against, alternate, ratio_row, row, seconds
from kvweave_bench.report import Report, Row, check_writable


def a_report(*rows: Row) -> Report:
    return Report(bench="demo", model="tiny", seed=3, rows=rows)


def test_file_has_exactly_the_promised_fields(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    a_report(Row(metric="served", arm="4K", value=0.5, unit="share", n=24)).write(path)
    found = json.loads(path.read_text())
    assert list(found) == ["bench", "version", "model", "machine", "seed", "rows"]
    assert found["rows"] == [
        {
            "metric": "served",
            "arm": "4K",
            "value": 0.5,
            "unit": "share",
            "n": 24,
            "p5": None,
            "p95": None,
            "baseline": None,
            "ratio": None,
        }
    ]
    assert {"cpu", "cores", "threads", "torch"} <= set(found["machine"])
    assert [each.name for each in tmp_path.iterdir()] == ["demo.json"]


def test_a_figure_that_is_no_number_is_never_written(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    with pytest.raises(ValueError, match="JSON"):
        a_report(Row(metric="served", arm="4K", value=math.nan, unit="share", n=0)).write(path)
    assert not path.exists()


def test_table_names_spread_variant_compared_with_model_and_machine() -> None:
    shown = io.StringIO()
    rows = [
        row("decode", "kvweave", [1.0, 2.0, 3.0], "ms", Against("transformers", [3.5, 7.0, 9.0]))
    ]
    a_report(*rows).print(Console(file=shown, width=140))
    text = shown.getvalue()
    for part in ("decode", "1.1 to 2.9", "3.5x", "transformers", "model tiny", "torch", "threads"):
        assert part in text


@pytest.mark.parametrize("where", ["no/such/folder/file.json", "."])
def test_a_place_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, where: str
) -> None:
    with pytest.raises(KvweaveError, match="no file can be written there"):
        check_writable(tmp_path / where)


def test_row_gives_median_and_spread_and_leaves_them_out_for_one_figure() -> None:
    many = row("m", "a", [float(i) for i in range(101)], "ms")
    assert (many.value, many.p5, many.p95, many.n) == (50, 5, 95, 101)
    one = row("m", "a", [7.0], "ms")
    assert (one.value, one.p5, one.p95, one.n) == (7, None, None, 1)


def test_ratio_is_better_is_larger_and_pairs_rounds() -> None:
    # A machine that slows down tenfold half way through leaves a paired ratio alone.
    ours, theirs = [1.0, 1.0, 10.0], [2.0, 2.0, 20.0]
    assert row("m", "a", ours, "ms", Against("x", theirs)).ratio == 2
    rate = ratio_row("m", "a", ours, Against("x", theirs, larger_is_better=True))
    assert (rate.value, rate.ratio, rate.p5, rate.p95, rate.baseline) == (0.5, 0.5, 0.5, 0.5, "x")
    with pytest.raises(ValueError, match="cannot be paired"):
        row("m", "a", [1.0], "ms", Against("x", [1.0, 2.0]))


def test_variants_take_turns_at_going_first_and_warm_up_is_thrown_away() -> None:
    order: list[tuple[str, int]] = []

    def variant(name: str) -> object:
        def run(index: int) -> float:
            order.append((name, index))
            return float(index)

        return run

    figures = alternate({"a": variant("a"), "b": variant("b")}, rounds=3, warm_up=1)  # type: ignore[dict-item]
    assert figures == {"a": [0.0, 1.0, 2.0], "b": [0.0, 1.0, 2.0]}
    assert sorted(order[:2]) == [("a", -1), ("b", -1)]
    assert [name for name, _ in order[2:]] == ["a", "b", "b", "a", "a", "b"]


def test_seconds_leaves_the_collector_as_it_was() -> None:
    import gc

    gc.disable()
    try:
        assert seconds(lambda: None) >= 0
        assert not gc.isenabled()
    finally:
        gc.enable()
    seconds(lambda: None)
    assert gc.isenabled()
