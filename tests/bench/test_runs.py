"""Every bench runs on a tiny model and reports right figures."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from kvweave.errors import ConfigError, KvweaveError
from kvweave_bench.options import BENCHES, BenchOptions
from kvweave_bench.registry import get_bench, run_bench
from kvweave_bench.report import Report, Row
from kvweave_bench.runs.heal import p95_ratio
from kvweave_bench.workloads.corpus import Corpus

Run = Callable[..., Report]


@pytest.fixture
def run(model: str, make_corpus: Callable[[int], Corpus], tmp_path: Path) -> Run:
    def run(name: str, **options: object) -> Report:
        console = Console(file=io.StringIO())
        path = tmp_path / "report.json"
        made = BenchOptions(model=model, quick=True, **options)  # type: ignore[arg-type]
        report = run_bench(name, made, json_path=path, console=console)
        assert json.loads(path.read_text())["rows"][0]["metric"] == report.rows[0].metric
        return report

    return run


def by_variant(report: Report, metric: str) -> dict[str, Row]:
    return {row.arm: row for row in report.rows if row.metric == metric}


def values(report: Report, metric: str) -> dict[str, float]:
    return {variant: row.value for variant, row in by_variant(report, metric).items()}


def test_cold_groups_compute_the_shared_prefix_once_only_where_they_wait(run: Run) -> None:
    report = run("cold-groups")
    assert values(report, "prefill_tokens_per_group") == {
        "none": 6272,
        "hash": 6272,
        "radix": 512,
        "radix-no-wait": 6272,
    }
    assert set(values(report, "identical_ids").values()) == {1.0}
    pages = values(report, "peak_pages")
    assert pages["radix"] == 3 + 16 < pages["none"] == 4 * 16
    first = by_variant(report, "first_token_ms")["radix"]
    assert first.n == 16
    assert first.p5 <= first.value <= first.p95


def test_engine_compares_with_transformers_and_with_one_after_another(run: Run) -> None:
    report = run("engine")
    for metric in ("prefill_512", "decode_after_512", "append_15_after_512"):
        ours = by_variant(report, metric)["kvweave"]
        theirs = by_variant(report, metric)["transformers"]
        assert (ours.baseline, theirs.baseline) == ("transformers", None)
        assert ours.ratio == pytest.approx(theirs.value / ours.value)
    together = by_variant(report, "decode_batch_8")["together"]
    alone = by_variant(report, "decode_batch_8")["one after another"]
    assert together.ratio == pytest.approx(together.value / alone.value)


def test_drafts_change_no_answer_and_what_they_were_worth_is_counted(run: Run) -> None:
    report = run("repeats")
    assert values(report, "identical_ids") == {"quoting": 1.0, "other": 1.0}
    for metric in ("accepted_share", "drafted_share"):
        assert all(0 <= share <= 1 for share in values(report, metric).values())
    speedup = by_variant(report, "decode_speedup")["quoting"]
    assert (speedup.baseline, speedup.value) == ("none", speedup.ratio)


def test_peers_are_compared_with_only_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KvweaveError, match="not 'speed'"):
        run_bench("peers", BenchOptions(quick=True, cells="memory,speed"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KvweaveError, match=r"pip install '\.\[peers\]'"):
        run_bench("peers", BenchOptions(quick=True))


def test_moved_documents_are_served_and_right(run: Run) -> None:
    report = run("moved")
    assert values(report, "served") == {"512": 1.0}
    assert values(report, "token_identity") == {"512": 1.0}
    assert values(report, "document_share")["512"] > 0.9
    speedup = by_variant(report, "first_token_speedup")["512"]
    assert speedup.baseline == "cold"
    assert speedup.ratio == speedup.value


def test_types_of_kv_are_compared_with_float32(run: Run) -> None:
    report = run("kv-dtype")
    kl = values(report, "kl_mean")
    assert kl.keys() == {
        f"{t}, {kind}" for t in ("bfloat16", "int8") for kind in ("exact", "moved")
    }
    assert all(0 < each < 0.1 for each in kl.values())
    assert values(report, "pool_tokens")["bfloat16"] == 2.0
    assert by_variant(report, "decode_after_512")["int8"].baseline == "float32"


def test_askers_of_one_document_share_it(run: Run) -> None:
    report = run("shared")
    pages = values(report, "peak_pages_ratio")
    assert pages["shared, 4 of 512"] < 1.15 < 2 < pages["copies, 4 of 512"]
    assert values(report, "identical_ids") == {"shared, 4 of 512": 1.0}


def test_shapes_are_measured_against_the_oracle(run: Run) -> None:
    report = run("shapes")
    served, oracle = values(report, "served_share"), values(report, "oracle_share")
    assert len(served) == 9
    assert served.keys() == oracle.keys()
    assert set(values(report, "token_identity").values()) == {1.0}
    assert served["new-wrapper"] > 0.6
    assert all(served[variant] <= oracle[variant] + 0.05 for variant in served)


def test_unrelated_prompts_are_not_served(run: Run) -> None:
    report = run("unrelated")
    assert values(report, "served") == {"fuzzy_match": 0.0}
    ratio = by_variant(report, "throughput_ratio")["fuzzy_match"]
    assert (ratio.n, ratio.baseline) == (3, "radix")


def test_the_clock_is_asked_about_anothers_text_and_about_ones_own(run: Run) -> None:
    report = run("salts")
    assert by_variant(report, "first_token_ms").keys() == {
        "never cached",
        "cached by another",
        "cached by oneself",
    }
    for ratio in by_variant(report, "first_token_ratio").values():
        assert (ratio.n, ratio.baseline) == (2, "never cached")
        assert ratio.p5 <= ratio.value <= ratio.p95


def test_unrelated_prompts_are_never_compared_by_meaning(run: Run) -> None:
    report = run("semantic")
    assert values(report, "embedded")["on"] > 0
    assert values(report, "compared") == {"on": 0}
    assert values(report, "first_token_p95_ratio")["on"] > 0


def test_an_agent_s_session_is_moved_behind_its_changing_head(run: Run) -> None:
    report = run("agents")
    share = by_variant(report, "reused_share")
    assert (share["fuzzy_match"].n, share["radix"].n) == (3, 3)
    assert share["radix"].value < 0.1 < 0.7 < share["fuzzy_match"].value
    assert values(report, "least_reused_share")["fuzzy_match"] > 0.7
    speedup = by_variant(report, "first_token_speedup")["fuzzy_match"]
    assert (speedup.baseline, speedup.value) == ("radix", speedup.ratio)


def test_healing_makes_exact_what_comes_again(run: Run) -> None:
    report = run("heal")
    assert values(report, "again_exact") == {"off": 0.0, "on": 1.0}
    healed = values(report, "healed_prompts")
    assert (healed["off"], healed["on"]) == (0, 2)
    assert values(report, "dropped_heals") == {"off": 0, "on": 0}
    ratio = by_variant(report, "first_token_p95_ratio")["on"]
    assert (ratio.n, ratio.baseline, ratio.ratio) == (2, "off", ratio.value)
    assert ratio.p5 <= ratio.value <= ratio.p95


def test_a_restart_is_measured_exact_and_moved(run: Run) -> None:
    report = run("restart")
    assert values(report, "identical_ids")["exact"] == 1.0
    speedup = by_variant(report, "first_token_speedup")
    assert speedup.keys() == {"exact", "moved"}
    assert all(row.baseline == "cold" and row.ratio == row.value for row in speedup.values())
    started = by_variant(report, "start_ms")
    assert started.keys() == {"no store", "0.01 GB"}
    assert started["0.01 GB"].n == 5


def test_what_shared_a_round_is_drawn_together() -> None:
    """Twenty figures of four rounds are four, where all of a round were slow alike."""
    off = [1.0] * 20
    on = [slow for slow in (1.0, 1.1, 1.2, 1.3) for _ in range(5)]
    single, rounds = p95_ratio(on, off, 0), p95_ratio(on, off, 0, together=5)
    assert single.value == rounds.value == pytest.approx(1 / 1.3)
    assert single.p5 == rounds.p5 == pytest.approx(1 / 1.3)
    assert single.p95 == pytest.approx(1 / 1.3)
    assert rounds.p95 == pytest.approx(1 / 1.1), (
        "1 of 16 times, neither of the two slowest is drawn"
    )


def test_lookup_needs_no_model(run: Run) -> None:
    report = run("lookup")
    assert report.model is None
    assert 0 < values(report, "bytes_per_token")["spans"] < 16
    assert {"hit_ms", "unrelated_ms"} <= {row.metric for row in report.rows}


def test_every_name_is_a_bench_that_knows_its_name() -> None:
    assert [get_bench(name).name for name in BENCHES] == list(BENCHES)


def test_an_unknown_bench_lists_the_known() -> None:
    with pytest.raises(KvweaveError, match=r"benches are cold-groups, .* not 'cold'"):
        run_bench("cold")


def test_bad_options_are_named_together() -> None:
    with pytest.raises(ConfigError) as caught:
        run_bench("lookup", BenchOptions(n=0, seed=-1))
    assert len(caught.value.problems) == 2


def test_grammar_counts_what_validates(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    schemas = [{"const": text * 12} for text in "abcdefgh"]
    schemas.insert(0, {"type": "array", "uniqueItems": True})
    monkeypatch.setattr("kvweave_bench.runs.grammar._schemas", lambda: iter(schemas))
    report = run("grammar", n=8)
    assert values(report, "valid_share") == {"json_schema": 1.0}
    assert values(report, "ended_share") == {"json_schema": 1.0}
    assert sum(values(report, "refused").values()) <= 1
    timed = by_variant(report, "token_time_ratio")
    assert timed["json_schema, greedy"].baseline == "none, greedy"
