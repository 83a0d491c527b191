"""One page for people: what a run found, with plots, tables and the worst answers, in one file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, TypeAlias

from kvweave.version import __version__
from kvweave_bench.quality import wording
from kvweave_bench.quality.arms import Arm
from kvweave_bench.quality.chart import Curve, Point, chart, strip
from kvweave_bench.quality.examples import worst_examples
from kvweave_bench.quality.intervals import Estimate
from kvweave_bench.quality.pairs import Compared
from kvweave_bench.quality.summary import figures

_Measured: TypeAlias = Mapping[Arm, Mapping[str, Estimate]]
"""One cell's figures, by arm and metric."""


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
    cells = [(each, _measured(each)) for each in page.compared]
    colours = _colours(page.compared)
    floor = next(
        (of[arm]["kl_mean"].value for each, of in cells if each.cell.rerun for arm in of), None
    )
    compared = [(each, of) for each, of in cells if len(_serving(of)) > 1]
    return Template(template).substitute(
        model=escape(page.model),
        about=escape(_about(page)),
        overview="".join(_overview(each, of) for each, of in cells),
        legend="".join(_key(strategy, at) for strategy, at in colours.items()) if compared else "",
        hidden="" if compared else " hidden",
        charts="".join(_chart(each, of, colours, floor) for each, of in compared),
        cells="".join(_cell(each, of, colours) for each, of in cells),
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
        arm: {each.metric: each.estimate for each in figures(compared.cases, pairs)}
        for arm, pairs in compared.pairs.items()
    }


def _serving(measured: _Measured) -> list[Arm]:
    """The arms that somebody might serve with."""
    return [arm for arm in measured if not arm.ablation]


def _colours(compared: Sequence[Compared]) -> dict[str, int]:
    """A number for every strategy that may be drawn, in the order in which they appear."""
    arms = [arm for each in compared if not each.cell.rerun for arm in each.pairs]
    strategies = dict.fromkeys(arm.strategy for arm in arms if not arm.ablation)
    return {strategy: number for number, strategy in enumerate(strategies)}


def _key(strategy: str, colour: int) -> str:
    dot = '<svg viewBox="0 0 14 14"><circle cx="7" cy="7" r="5"/></svg>'
    return f'<li class="s{colour}">{dot}{escape(strategy)}</li>'


def _overview(compared: Compared, measured: _Measured) -> str:
    """One line on a cell: its first arm, which is the one that matters most."""
    arm = next(iter(measured))
    of = measured[arm]
    kl = of["kl_mean"]
    cells = [
        f'<th scope="row"><a href="#{compared.cell.name}">{compared.cell.name}</a>'
        f"<small>{escape(arm.name)}, n = {kl.n}</small></th>",
        f"<td>{wording.times(of['first_token_speedup'].value)}</td>",
        f"<td>{wording.percent(of['reused_share'].value)}</td>",
        f'<td class="strip">{strip(kl.value, kl.low, kl.high)}</td>',
        f"<td>{wording.nats(kl.value)}</td>",
        f"<td>{wording.ratio(of['ppl_ratio'].value)}</td>",
        f"<td>{wording.ratio(of['rouge_l'].value)}</td>",
        _told(of, "gold"),
        _told(of, "decoy"),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _told(of: Mapping[str, Estimate], fact: str) -> str:
    """How often a fact was given warm, and cold."""
    warm, cold = of.get(f"{fact}_warm"), of.get(f"{fact}_cold")
    if warm is None or cold is None:
        return "<td></td>"
    return f"<td>{wording.count(warm)}<small>cold {wording.count(cold)}</small></td>"


def _divergence(of: Mapping[str, Estimate], _: str) -> str:
    """The median, and under it where the worst twentieth begins."""
    median, p95 = (wording.nats(of[metric].value) for metric in ("kl_median", "kl_p95"))
    return f"<td>{median}<small>p95 {p95}</small></td>"


def _figure(of: Mapping[str, Estimate], metric: str) -> str:
    return f"<td>{wording.figure(metric, of[metric])}</td>"


def _chart(
    compared: Compared, measured: _Measured, colours: Mapping[str, int], floor: float | None
) -> str:
    """A curve per strategy; the first one's points say their budgets, the others' are in line."""
    curves: list[Curve] = []
    for strategy, colour in colours.items():
        arms = sorted(
            (arm for arm in measured if arm.strategy == strategy), key=lambda arm: arm.budget
        )
        points = [_point(arm, measured[arm], label=not curves or len(arms) == 1) for arm in arms]
        curves.append(Curve(colour, points))
    name = compared.cell.name
    drawn = chart(curves, floor, f"Quality against speed: {name}")
    return f"<figure><figcaption><b>{name}</b> {compared.cell.summary}</figcaption>{drawn}</figure>"


def _point(arm: Arm, of: Mapping[str, Estimate], label: bool) -> Point:
    kl, speed = of["kl_mean"], of["first_token_speedup"].value
    interval = f"{kl.value:.2g} ({kl.low:.2g} to {kl.high:.2g})"
    told = f"{arm.name}: {speed:.1f} times sooner, KL {interval}"
    shown = f"{arm.budget:.0%}" if arm.budget else arm.strategy
    return Point(speed, kl.value, kl.low, kl.high, shown if label else "", told)


def _cell(compared: Compared, measured: _Measured, colours: Mapping[str, int]) -> str:
    cell = compared.cell
    judged = {metric.split("_")[0] for of in measured.values() for metric in of}
    columns = [each for each in _COLUMNS if each[2] is not _told or each[1] in judged]
    body = []
    strategies = list(dict.fromkeys(arm.strategy for arm in measured))
    for arm in sorted(measured, key=lambda arm: (strategies.index(arm.strategy), arm.budget)):
        cells = "".join(show(measured[arm], metric) for _, metric, show in columns)
        colour = f' class="s{colours[arm.strategy]}"' if arm.strategy in colours else ""
        body.append(f'<tr><th scope="row"{colour}><i></i>{escape(arm.name)}</th>{cells}</tr>')
    head = "".join(f"<th scope='col'>{title}</th>" for title, _, _ in columns)
    n = next(iter(measured.values()))["kl_mean"].n
    return (
        f'<section id="{cell.name}"><h2>{cell.name}</h2>'
        f"<p>{escape(cell.summary)}; n = {n} prompts. {_remark(compared, measured)}</p>"
        f'<div class="wide"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
        f"<details open><summary>Furthest from their cold answers</summary>"
        f"{worst_examples(compared)}</details></section>"
    )


def _remark(compared: Compared, measured: _Measured) -> str:
    """What has to be said in words: whether positions were right, whether anything was moved."""
    worst = min(of["token_identity"].value for of in measured.values())
    if worst < 1:
        return f"<b>Some moved positions hold other tokens ({wording.percent(worst)} right).</b>"
    fired = max(of["fired"].value for of in measured.values())
    if compared.cell.lives:
        return f"Text was moved for {wording.percent(fired)} of the prompts."
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
