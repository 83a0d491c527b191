"""Figures from pairs: one row per scenario, variant and metric, with its interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvweave.engine.selfcheck.measure import Verdict, verdict
from kvweave_bench.measure import Against, paired_ratios
from kvweave_bench.quality.metrics import Estimate, bootstrap, share, token_f1
from kvweave_bench.quality.pairs import Compared, Pair
from kvweave_bench.quality.writer import Case
from kvweave_bench.report import Row


@dataclass(frozen=True, slots=True)
class Figure:
    """What one variant reached in one scenario, by one metric."""

    metric: str
    estimate: Estimate
    unit: str


def figures(cases: Sequence[Case], pairs: Sequence[Pair]) -> list[Figure]:
    """All metrics of one variant in one scenario. Pairs hold indices into `cases`."""
    kl = [pair.kl for pair in pairs]

    def mean(metric: str, of: Callable[[Pair], float], unit: str) -> Figure:
        return Figure(metric, bootstrap([of(pair) for pair in pairs]), unit)

    found = [
        Figure("kl_mean", bootstrap(kl), "nats"),
        Figure("kl_median", bootstrap(kl, "median"), "nats"),
        Figure("kl_p95", bootstrap(kl, "p95"), "nats"),
        mean("kl_answer", lambda pair: pair.kl_answer, "nats, mean over the answer"),
        Figure("top1", _share(pair.same_top for pair in pairs), "share of prompts"),
        mean("ppl_ratio", lambda pair: pair.ppl_ratio, "x"),
        mean("rouge_l", lambda pair: pair.rouge_l, "F of words"),
        mean("token_f1", lambda pair: pair.token_f1, "F of words"),
        *_facts(cases, pairs),
        mean("reused_share", lambda pair: pair.reused, "share of the prompt"),
        mean("paraphrased_share", lambda pair: pair.paraphrased, "share of the prompt"),
        Figure("paraphrased", _share(pair.paraphrased > 0 for pair in pairs), "share of prompts"),
        mean("refreshed_share", lambda pair: pair.refreshed, "share of the prompt"),
        Figure("fired", _share(pair.fired for pair in pairs), "share of prompts"),
    ]
    worst = min(pair.identity for pair in pairs)
    found.append(
        Figure("token_identity", Estimate(worst, worst, worst, len(pairs)), "worst prompt's share")
    )
    found.append(Figure("first_token_speedup", bootstrap(_speedups(pairs), "median"), "x"))
    return found


def rows(compared: Compared) -> list[Row]:
    """What the report's file holds; p5 and p95 are the ends of the 90 % interval of the value."""
    return [
        row_of(f"{compared.scenario.name}/{variant.name}", figure)
        for variant, pairs in compared.pairs.items()
        for figure in figures(compared.cases, pairs)
    ]


def in_a_line(cases: Sequence[Case], pairs: Sequence[Pair]) -> str:
    """The most important figures, shown while the run goes on."""
    of = {each.metric: each.estimate.value for each in figures(cases, pairs)}
    shown = ("kl_mean", "kl_median", "ppl_ratio", "rouge_l", "reused_share", "first_token_speedup")
    facts = ("gold_cold", "gold_warm", "decoy_cold", "decoy_warm")
    return ", ".join(f"{name} {of[name]:.3g}" for name in (*shown, *facts) if name in of)


def fact_of(case: Case, answer: str) -> Verdict:
    """Which fact an answer gives."""
    return verdict(answer, case.gold or "", case.decoy)


def row_of(variant: str, figure: Figure) -> Row:
    """One figure of one variant, as the report's file holds it."""
    estimate = figure.estimate
    speedup = figure.metric == "first_token_speedup"
    return Row(
        metric=figure.metric,
        arm=variant,
        value=estimate.value,
        unit=figure.unit,
        n=estimate.n,
        p5=estimate.low,
        p95=estimate.high,
        baseline="cold" if speedup else None,
        ratio=estimate.value if speedup else None,
    )


def _facts(cases: Sequence[Case], pairs: Sequence[Pair]) -> list[Figure]:
    """How often the prompt's own fact was given, and the donor's in its place; words in common
    with the former."""
    found = []
    asked = [pair for pair in pairs if cases[pair.case].gold is not None]
    tempted = [pair for pair in asked if cases[pair.case].decoy is not None]
    for wanted, judged in (("gold", asked), ("decoy", tempted)):
        if judged:
            cold = _share(fact_of(cases[pair.case], pair.cold_text) == wanted for pair in judged)
            warm = _share(fact_of(cases[pair.case], pair.warm_text) == wanted for pair in judged)
            found.append(Figure(f"{wanted}_cold", cold, "share of answers"))
            found.append(Figure(f"{wanted}_warm", warm, "share of answers"))
    for metric, text in (("gold_f1_cold", "cold_text"), ("gold_f1_warm", "warm_text")):
        scores = [token_f1(cases[pair.case].gold or "", getattr(pair, text)) for pair in asked]
        if scores:
            found.append(Figure(metric, bootstrap(scores), "F of words, against the fact"))
    return found


def _speedups(pairs: Sequence[Pair]) -> list[float]:
    cold = Against("cold", [pair.cold_seconds for pair in pairs])
    return paired_ratios([pair.warm_seconds for pair in pairs], cold)


def _share(hits: Iterable[bool]) -> Estimate:
    said = list(hits)
    return share(sum(said), len(said))
