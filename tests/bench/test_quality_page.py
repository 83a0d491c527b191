"""Figures and page of bench quality, from hand-made pairs."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from kvweave_bench.quality.page import Page, render, write_page
from kvweave_bench.quality.pairs import Compared, Pair
from kvweave_bench.quality.scenarios import Scenario
from kvweave_bench.quality.summary import figures, rows
from kvweave_bench.quality.variants import Variant
from kvweave_bench.quality.writer import Case
from kvweave_bench.report import describe_machine

NOBODY = np.zeros(1, np.int32)
SCENARIO = Scenario(name="moved", summary="a document, moved", build=lambda *_: CASES[0])
CASES = [
    Case((NOBODY,), NOBODY, "Where?", "It is in Lima.", "Lima", "Quito"),
    Case((NOBODY,), NOBODY, "Which <i>city</i>?", "It is Oslo.", "Oslo", "Bergen"),
    Case((NOBODY,), NOBODY, "When?", "In 1999.", "1999", "2001"),
]
PAIR = Pair(
    case=0,
    kl=0.01,
    kl_answer=0.02,
    same_top=True,
    ppl_ratio=1.05,
    rouge_l=0.5,
    token_f1=0.25,
    cold_text="in Lima",
    warm_text="in Lima",
    reused=0.9,
    paraphrased=0.0,
    refreshed=0.1,
    fired=True,
    identity=1.0,
    cold_seconds=2.0,
    warm_seconds=0.5,
)
PAIRS = [
    PAIR,
    replace(PAIR, case=1, kl=0.03, cold_text="Oslo, surely", warm_text="<b>Bergen</b>, surely"),
    replace(PAIR, case=2, kl=0.02, cold_text="2001", warm_text="", cold_seconds=4.0),
]
VARIANTS = ["copy/0", "seams/0.15", "seams/0.3", "zero-mask/0"]


def compared(name: str = "moved", pairs: list[Pair] = PAIRS) -> Compared:
    variants = [Variant(part.split("/")[0], float(part.split("/")[1])) for part in VARIANTS]
    return Compared(replace(SCENARIO, name=name), CASES, dict.fromkeys(variants, pairs))


def page(*scenarios: Compared) -> Page:
    return Page("tiny <model>", describe_machine(), 7, scenarios or (compared(),))


def test_every_promised_figure_is_there_and_right() -> None:
    found = {each.metric: each.estimate for each in figures(CASES, PAIRS)}
    expected = {
        "kl_mean": 0.02,
        "kl_median": 0.02,
        "kl_p95": 0.029,
        "top1": 1,
        "ppl_ratio": 1.05,
        "rouge_l": 0.5,
        "token_f1": 0.25,
        "gold_cold": 2 / 3,
        "gold_warm": 1 / 3,
        "decoy_cold": 1 / 3,
        "decoy_warm": 1 / 3,
        "gold_f1_cold": 4 / 9,
        "gold_f1_warm": 2 / 9,
        "reused_share": 0.9,
        "refreshed_share": 0.1,
        "first_token_speedup": 4.0,
        "token_identity": 1.0,
    }
    assert {name: found[name].value for name in expected} == pytest.approx(expected)
    assert all(each.low <= each.value <= each.high and each.n == 3 for each in found.values())


def test_one_wrong_position_is_not_averaged_away() -> None:
    pairs = [PAIR, replace(PAIR, case=1, identity=0.5)]
    found = {each.metric: each.estimate.value for each in figures(CASES, pairs)}
    assert found["token_identity"] == 0.5
    assert "Some moved positions hold other tokens (50 % right)" in render(
        page(compared(pairs=pairs))
    )


def test_scenarios_without_facts_have_no_figures_on_them() -> None:
    cases = [replace(case, gold=None, decoy=None) for case in CASES]
    names = {each.metric for each in figures(cases, PAIRS)}
    assert not {"gold_cold", "gold_warm", "decoy_cold", "decoy_warm", "gold_f1_warm"} & names
    cases = [replace(case, decoy=None) for case in CASES]
    names = {each.metric for each in figures(cases, PAIRS)}
    assert {"gold_cold", "gold_warm"} <= names
    assert "decoy_warm" not in names


def test_rows_name_scenario_strategy_and_budget() -> None:
    found = rows(compared())
    assert {row.arm for row in found} == {f"moved/{variant}" for variant in VARIANTS}
    speed = next(row for row in found if row.metric == "first_token_speedup")
    assert (speed.value, speed.ratio, speed.baseline) == (4.0, 4.0, "cold")
    kl = next(row for row in found if row.metric == "kl_mean")
    assert kl.p5 is not None
    assert kl.p95 is not None
    assert 0.01 <= kl.p5 < kl.value < kl.p95 <= 0.03


class Balanced(HTMLParser):
    """Fails on a tag that is never closed, or closed too early."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in ("meta", "line", "circle", "polyline", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_whole_file_that_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, page(compared(), compared("rerun")))
    text = path.read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(re.sub(r"(<(?:line|circle|polyline)[^>]*)/>", r"\1>", text))
    assert parser.open == []
    assert all(link.startswith("#") for link in parser.loads)
    assert not re.search(r"<script|url\(|@import|https?:", text)
    assert "prefers-color-scheme: dark" in text
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_what_models_and_prompts_say_is_never_markup() -> None:
    text = render(page())
    assert "tiny &lt;model&gt;" in text
    assert "Which &lt;i&gt;city&lt;/i&gt;?" in text
    assert "<b>Bergen" not in text


def test_a_curve_per_strategy_a_point_per_budget_and_no_ablations() -> None:
    text = render(page())
    (drawing,) = re.findall(r'<svg class="chart".*?</svg>', text, re.DOTALL)
    assert drawing.count("<circle") == 3
    assert drawing.count("<polyline") == 1  # seams: the only strategy with two budgets
    assert ">copy<" in drawing
    assert "seams/0.3: 4.0 times sooner, KL 0.02" in drawing
    assert "zero-mask" not in drawing
    assert "</i>zero-mask/0</th>" in text


def test_one_variant_alone_is_no_plot() -> None:
    alone = replace(compared(), pairs={Variant("copy"): PAIRS, Variant("unrotated"): PAIRS})
    text = render(page(alone))
    assert "<section hidden><h2>Quality against speed" in text
    assert '<svg class="chart"' not in text


def test_noise_is_drawn_where_it_was_measured() -> None:
    assert "computed twice" not in render(page())
    noise = Compared(replace(SCENARIO, name="rerun", rerun=True), CASES, {Variant("rerun"): PAIRS})
    assert "computed twice" in render(page(compared(), noise))


def test_facts_taken_from_the_donor_are_the_worst_examples() -> None:
    text = render(page())
    shown = re.findall(r"<article.*?</article>", text, re.DOTALL)
    assert len(shown) == 3
    assert "Which" in shown[0]
    assert "donor's fact</span>" in shown[0]
    assert "right</span>" in shown[0]
    assert "<mark>&lt;b&gt;Bergen&lt;/b&gt;,</mark> surely" in shown[0]
    assert "<i>nothing</i>" in text


def test_counts_of_facts_stand_beside_the_cold_models() -> None:
    text = render(page())
    assert "<td>1 of 3<small>cold 2 of 3</small></td>" in text
    assert "<td>1 of 3<small>cold 1 of 3</small></td>" in text


def test_divergences_of_nothing_can_be_drawn() -> None:
    same = replace(PAIR, kl=0.0, kl_answer=0.0, warm_seconds=2.0)
    text = render(page(compared(pairs=[same, replace(same, case=1)])))
    assert "nan" not in text
    assert "inf" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL).replace("info", "")
