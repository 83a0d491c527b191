"""The answers that went furthest from their cold ones, beside them."""

from __future__ import annotations

from html import escape

from kvweave_bench.quality.pairs import Compared, Pair
from kvweave_bench.quality.summary import fact_of
from kvweave_bench.quality.variants import Variant
from kvweave_bench.quality.wording import marked, nats, ratio
from kvweave_bench.quality.writer import Case

_SHOWN = 3
_FACTS = {"gold": "right", "decoy": "the donor's fact", "neither": "not answered"}


def worst_examples(compared: Compared) -> str:
    """The worst few of a scenario, of the variants that somebody might serve with; each case once.

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
