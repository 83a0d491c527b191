"""The HTML page of bench quality: plots, tables and the worst answers, in one file."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, TypeAlias

from kvweave.version import __version__
from kvweave_bench.quality.chart import Curve, Point, chart, strip
from kvweave_bench.quality.metrics import Estimate
from kvweave_bench.quality.pairs import Compared, Pair
from kvweave_bench.quality.summary import fact_of, figures
from kvweave_bench.quality.variants import Variant
from kvweave_bench.quality.writer import Case

_Measured: TypeAlias = Mapping[Variant, Mapping[str, Estimate]]
"""One scenario's figures, by variant and metric."""


@dataclass(frozen=True, slots=True)
class Page:
    """What the page tells."""

    model: str
    machine: Mapping[str, Any]
    seed: int
    compared: Sequence[Compared]


def write_page(path: Path, page: Page) -> None:
    """Write the file as a whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(render(page), encoding="utf-8")
    os.replace(partial, path)


def render(page: Page) -> str:
    """The page as HTML that refers to no other file."""
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    scenarios = [(each, _measured(each)) for each in page.compared]
    colours = _colours(page.compared)
    floor = next(
        (
            of[variant]["kl_mean"].value
            for each, of in scenarios
            if each.scenario.rerun
            for variant in of
        ),
        None,
    )
    compared = [(each, of) for each, of in scenarios if len(_serving(of)) > 1]
    return Template(template).substitute(
        model=escape(page.model),
        about=escape(_about(page)),
        overview="".join(_overview(each, of) for each, of in scenarios),
        legend="".join(_key(strategy, at) for strategy, at in colours.items()) if compared else "",
        hidden="" if compared else " hidden",
        charts="".join(_chart(each, of, colours, floor) for each, of in compared),
        cells="".join(_scenario(each, of, colours) for each, of in scenarios),
    )


def _about(page: Page) -> str:
    of = page.machine
    texts = ", ".join(of.get("texts", {}).values())
    return (
        f"kvweave {__version__} · {of['cpu']}, {of['threads']} threads · torch {of['torch']} · "
        f"seed {page.seed}" + (f" · texts: {texts}" if texts else "")
    )


def _measured(compared: Compared) -> _Measured:
    return {
        variant: {each.metric: each.estimate for each in figures(compared.cases, pairs)}
        for variant, pairs in compared.pairs.items()
    }


def _serving(measured: _Measured) -> list[Variant]:
    """The variants that a server offers."""
    return [variant for variant in measured if not variant.ablation]


def _colours(compared: Sequence[Compared]) -> dict[str, int]:
    """A number for every strategy that may be drawn, in the order in which they appear."""
    variants = [variant for each in compared if not each.scenario.rerun for variant in each.pairs]
    strategies = dict.fromkeys(variant.strategy for variant in variants if not variant.ablation)
    return {strategy: number for number, strategy in enumerate(strategies)}


def _key(strategy: str, colour: int) -> str:
    dot = '<svg viewBox="0 0 14 14"><circle cx="7" cy="7" r="5"/></svg>'
    return f'<li class="s{colour}">{dot}{escape(strategy)}</li>'


def _overview(compared: Compared, measured: _Measured) -> str:
    """One line on a scenario: its first variant, which is the one that matters most."""
    variant = next(iter(measured))
    of = measured[variant]
    kl = of["kl_mean"]
    cells = [
        f'<th scope="row"><a href="#{compared.scenario.name}">{compared.scenario.name}</a>'
        f"<small>{escape(variant.name)}, n = {kl.n}</small></th>",
        f"<td>{times(of['first_token_speedup'].value)}</td>",
        f"<td>{percent(of['reused_share'].value)}</td>",
        f'<td class="strip">{strip(kl.value, kl.low, kl.high)}</td>',
        f"<td>{nats(kl.value)}</td>",
        f"<td>{ratio(of['ppl_ratio'].value)}</td>",
        f"<td>{ratio(of['rouge_l'].value)}</td>",
        _told(of, "gold"),
        _told(of, "decoy"),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _told(of: Mapping[str, Estimate], fact: str) -> str:
    """How often a fact was given warm, and cold."""
    warm, cold = of.get(f"{fact}_warm"), of.get(f"{fact}_cold")
    if warm is None or cold is None:
        return "<td></td>"
    return f"<td>{count(warm)}<small>cold {count(cold)}</small></td>"


def _divergence(of: Mapping[str, Estimate], _: str) -> str:
    """The median, and under it where the worst twentieth begins."""
    median, p95 = (nats(of[metric].value) for metric in ("kl_median", "kl_p95"))
    return f"<td>{median}<small>p95 {p95}</small></td>"


def _figure(of: Mapping[str, Estimate], metric: str) -> str:
    return f"<td>{figure(metric, of[metric])}</td>"


def _chart(
    compared: Compared, measured: _Measured, colours: Mapping[str, int], floor: float | None
) -> str:
    """A curve per strategy; the first one's points say their budgets, the others' are in line."""
    curves: list[Curve] = []
    for strategy, colour in colours.items():
        variants = sorted(
            (variant for variant in measured if variant.strategy == strategy),
            key=lambda variant: variant.budget,
        )
        points = [
            _point(variant, measured[variant], label=not curves or len(variants) == 1)
            for variant in variants
        ]
        curves.append(Curve(colour, points))
    name = compared.scenario.name
    drawn = chart(curves, floor, f"Quality against speed: {name}")
    caption = f"<figcaption><b>{name}</b> {compared.scenario.summary}</figcaption>"
    return f"<figure>{caption}{drawn}</figure>"


def _point(variant: Variant, of: Mapping[str, Estimate], label: bool) -> Point:
    kl, speed = of["kl_mean"], of["first_token_speedup"].value
    interval = f"{kl.value:.2g} ({kl.low:.2g} to {kl.high:.2g})"
    told = f"{variant.name}: {speed:.1f} times sooner, KL {interval}"
    shown = f"{variant.budget:.0%}" if variant.budget else variant.strategy
    return Point(speed, kl.value, kl.low, kl.high, shown if label else "", told)


def _scenario(compared: Compared, measured: _Measured, colours: Mapping[str, int]) -> str:
    scenario = compared.scenario
    judged = {metric.split("_")[0] for of in measured.values() for metric in of}
    columns = [each for each in _COLUMNS if each[2] is not _told or each[1] in judged]
    body = []
    strategies = list(dict.fromkeys(variant.strategy for variant in measured))
    for variant in sorted(
        measured, key=lambda variant: (strategies.index(variant.strategy), variant.budget)
    ):
        cells = "".join(show(measured[variant], metric) for _, metric, show in columns)
        colour = f' class="s{colours[variant.strategy]}"' if variant.strategy in colours else ""
        body.append(f'<tr><th scope="row"{colour}><i></i>{escape(variant.name)}</th>{cells}</tr>')
    head = "".join(f"<th scope='col'>{title}</th>" for title, _, _ in columns)
    n = next(iter(measured.values()))["kl_mean"].n
    return (
        f'<section id="{scenario.name}"><h2>{scenario.name}</h2>'
        f"<p>{escape(scenario.summary)}; n = {n} prompts. {_remark(compared, measured)}</p>"
        f'<div class="wide"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
        f"<details open><summary>Furthest from their cold answers</summary>"
        f"{worst_examples(compared)}</details></section>"
    )


def _remark(compared: Compared, measured: _Measured) -> str:
    """What has to be said in words: whether positions were right, whether anything was moved."""
    worst = min(of["token_identity"].value for of in measured.values())
    if worst < 1:
        return f"<b>Some moved positions hold other tokens ({percent(worst)} right).</b>"
    fired = max(of["fired"].value for of in measured.values())
    if compared.scenario.lives:
        return f"Text was moved for {percent(fired)} of the prompts."
    return "Every moved position holds the prompt's own token." if fired else ""


_COLUMNS = (
    ("first token sooner", "first_token_speedup", _figure),
    ("KL mean", "kl_mean", _figure),
    ("KL median", "", _divergence),
    ("KL along the answer", "kl_answer", _figure),
    ("same top token", "top1", _figure),
    ("perplexity ratio", "ppl_ratio", _figure),
    ("ROUGE-L", "rouge_l", _figure),
    ("word F1", "token_f1", _figure),
    ("right answers", "gold", _told),
    ("donor's fact", "decoy", _told),
    ("reused", "reused_share", _figure),
    ("refreshed", "refreshed_share", _figure),
)


def nats(value: float) -> str:
    """A divergence: two digits that count, a power of ten where it is tiny."""
    if value < 1e-7:
        return "0"
    if value >= 1e-3:
        return f"{value:.2g}"
    power = math.floor(math.log10(value))
    return f"{value / 10.0**power:.1f}·10<sup>&minus;{-power}</sup>"


def percent(value: float) -> str:
    """A share; a decimal only close to all or nothing, where it makes a difference."""
    near_the_end = 0 < min(value, 1 - value) < 0.0995
    return f"{100 * value:.1f} %" if near_the_end else f"{100 * value:.0f} %"


def times(value: float) -> str:
    """How many times sooner."""
    return (
        f"{value:.2f}&times;"
        if value < 3
        else f"{value:.1f}&times;"
        if value < 20
        else f"{value:.0f}&times;"
    )


def ratio(value: float) -> str:
    """A perplexity ratio or an F measure: three decimals."""
    return f"{value:.3f}"


def count(estimate: Estimate) -> str:
    """A share of n as what was counted."""
    return f"{round(estimate.value * estimate.n)} of {estimate.n}"


_FORMATS = {
    "kl_mean": nats,
    "kl_median": nats,
    "kl_p95": nats,
    "kl_answer": nats,
    "ppl_ratio": ratio,
    "rouge_l": ratio,
    "token_f1": ratio,
    "first_token_speedup": times,
}


def figure(metric: str, estimate: Estimate) -> str:
    """A figure, and under it the interval that holds it 9 times in 10."""
    show = _FORMATS.get(metric, percent)
    low, high = show(estimate.low), show(estimate.high)
    return f"{show(estimate.value)}<small>{low}&ndash;{high}</small>"


def marked(text: str, reference: str) -> str:
    """`text`, its words marked where they are not those of `reference`."""
    ours, theirs = text.split(), reference.split()
    parts = []
    for kind, _, _, start, end in difflib.SequenceMatcher(None, theirs, ours, False).get_opcodes():
        words = escape(" ".join(ours[start:end]))
        if words:
            parts.append(words if kind == "equal" else f"<mark>{words}</mark>")
    return " ".join(parts)


_SHOWN = 3
_FACTS = {"gold": "right", "decoy": "the donor's fact", "neither": "not answered"}


def worst_examples(compared: Compared) -> str:
    """The worst few of a scenario, of the variants that a server offers; each case once.

    Facts lost come first, those taken from the donor before all; then the largest divergence.
    """
    pairs = [
        (variant, pair)
        for variant, found in compared.pairs.items()
        if not variant.ablation
        for pair in found
    ]
    pairs.sort(key=lambda each: _badness(compared.cases[each[1].case], each[1]), reverse=True)
    shown: dict[int, str] = {}
    for variant, pair in pairs:
        if len(shown) < _SHOWN and pair.case not in shown:
            shown[pair.case] = _example(variant, compared.cases[pair.case], pair)
    return "".join(shown.values())


def _badness(case: Case, pair: Pair) -> tuple[int, float]:
    lost = 0
    if case.gold is not None:
        cold, warm = (fact_of(case, text) for text in (pair.cold_text, pair.warm_text))
        if cold == "gold" and warm != "gold":
            lost = 2 if warm == "decoy" else 1
    return lost, pair.kl_answer


def _example(variant: Variant, case: Case, pair: Pair) -> str:
    stated = f'<p class="stated">{escape(case.stated)}</p>' if case.stated else ""
    return (
        '<article class="example"><header>'
        f"<p><b>{escape(case.question)}</b></p>{stated}"
        f'<p class="note">prompt {pair.case + 1} · {escape(variant.name)} · next token KL '
        f"{nats(pair.kl)} · along the answer {nats(pair.kl_answer)} · perplexity &times; "
        f"{ratio(pair.ppl_ratio)}</p></header>"
        f"{_answer('cold', case, pair.cold_text, escape(pair.cold_text))}"
        f"{_answer('warm', case, pair.warm_text, marked(pair.warm_text, pair.cold_text))}"
        "</article>"
    )


def _answer(which: str, case: Case, text: str, html: str) -> str:
    badge = ""
    if case.gold is not None:
        fact = fact_of(case, text)
        badge = f'<span class="badge {fact}">{_FACTS[fact]}</span>'
    return f"<div><h4>{which} {badge}</h4><p>{html or '<i>nothing</i>'}</p></div>"
