"""Bench: labelled pairs of questions that the paraphrase gate passes, rightly and wrongly."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.paraphrase.embedders import make_embedder
from kvweave.paraphrase.facts import Verifier, differing
from kvweave_bench.base import Bench
from kvweave_bench.in_prompts import HARD_NEGATIVES, KINDS, Pair, labelled_pairs, served_in_prompts
from kvweave_bench.measure import quiet_collector, row
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting

_AS_PROMPTS = {
    "_in_prompts": FuzzyConfig(),
    "_in_prompts_any_length": FuzzyConfig(semantic_min_span=1),
}
"""Most pairs differ in a word or two; by default such short runs are computed by every gate."""
_ROUNDS = 5
_BATCH = 50


def measure(setting: Setting) -> list[Row]:
    """The same pairs at the same, default threshold: by cosine alone, and with each gate; as texts,
    and as prompts through the cache."""
    pairs = labelled_pairs(setting)
    gates: dict[str, Verifier] = {"cosine": lambda donor, recipient: None, "facts": differing}
    theirs = _semblend(setting)
    if theirs is not None:
        gates["semblend"] = theirs
    rows = _rows(pairs, _as_texts(pairs, gates, _likenesses(setting, pairs)), "")
    for where, config in _AS_PROMPTS.items():
        in_prompts = served_in_prompts(setting, pairs, gates, config)
        rows += _rows(pairs, in_prompts, where)
        for variant, tokens in in_prompts.items():
            if any(tokens):
                served = [float(count) for count in tokens if count]
                rows.append(row(f"tokens{where}", variant, served, "tokens"))
    return rows + _timings(pairs, gates)


def _as_texts(
    pairs: Sequence[Pair], gates: Mapping[str, Verifier], likenesses: Sequence[float]
) -> dict[str, list[int]]:
    """By gate, for each pair: 1 if both are alike enough and it has nothing against them, or 0."""
    least = FuzzyConfig().semantic_threshold
    passed = {
        variant: [gate(pair.donor, pair.recipient) is None for pair in pairs]
        for variant, gate in gates.items()
    }
    served = {
        variant: [int(fits and alike >= least) for fits, alike in zip(fit, likenesses, strict=True)]
        for variant, fit in passed.items()
    }
    served["facts, no cosine"] = [int(fits) for fits in passed["facts"]]
    known = [
        alike for pair, alike in zip(pairs, likenesses, strict=True) if pair.kind in HARD_NEGATIVES
    ]
    served["cosine, none false"] = [int(alike > max(known, default=1.0)) for alike in likenesses]
    return served


def _likenesses(setting: Setting, pairs: Sequence[Pair]) -> list[float]:
    """The cosine of what both of each pair mean to the default embedder."""
    embedder = make_embedder(FuzzyConfig().semantic_embedder)
    found: list[float] = []
    with setting.progress("batches of texts", -(-len(pairs) // _BATCH)) as advance:
        for at in range(0, len(pairs), _BATCH):
            batch = pairs[at : at + _BATCH]
            donors = embedder.encode([pair.donor for pair in batch])
            recipients = embedder.encode([pair.recipient for pair in batch])
            found += np.einsum("nd,nd->n", donors, recipients).tolist()
            advance()
    return found


def _semblend(setting: Setting) -> Verifier | None:
    """semblend's own fact gate, if that package is installed."""
    if find_spec("semblend_core") is None:
        setting.console.print("semblend is not installed, so its gate is not measured")
        return None
    consistent: Callable[[str, str], bool] = importlib.import_module(
        "semblend_core.fact_gate"
    ).spans_fact_consistent
    return lambda donor, recipient: None if consistent(donor, recipient) else "facts differ"


def _rows(pairs: Sequence[Pair], served: Mapping[str, Sequence[int]], where: str) -> list[Row]:
    """How many pairs of each kind are served, of all and of those that were held out."""
    rows = []
    for half, looked_at in (("", True), ("_held_out", False)):
        for metric, kinds in KINDS.items():
            of = [
                at
                for at, pair in enumerate(pairs)
                if pair.kind in kinds and (looked_at or pair.held_out)
            ]
            if of:
                rows += [
                    Row(
                        metric=metric + where + half,
                        arm=variant,
                        value=float(sum(found[at] > 0 for at in of)),
                        unit="pairs",
                        n=len(of),
                    )
                    for variant, found in served.items()
                ]
    return rows


def _timings(pairs: Sequence[Pair], gates: Mapping[str, Verifier]) -> list[Row]:
    """Microseconds that a pair takes."""
    taken: dict[str, list[float]] = {variant: [] for variant in gates if variant != "cosine"}
    with quiet_collector():
        for _ in range(_ROUNDS):
            for pair in pairs:
                for variant, figures in taken.items():
                    start = time.perf_counter()
                    gates[variant](pair.donor, pair.recipient)
                    figures.append(1e6 * (time.perf_counter() - start))
    return [
        row("microseconds_per_pair", variant, figures, "us") for variant, figures in taken.items()
    ]


BENCH = Bench(
    name="paraphrase-gate",
    counts="labelled pairs",
    n=600,
    quick_n=60,
    measure=measure,
)
