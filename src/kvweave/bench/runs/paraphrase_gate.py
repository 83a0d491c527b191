"""Which labelled pairs of questions would be served in other words, and which of them wrongly."""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from kvweave.bench.base import Bench
from kvweave.bench.measure import quiet_collector, row
from kvweave.bench.report import Row
from kvweave.bench.setting import Setting
from kvweave.config import FuzzyConfig
from kvweave.fuzzy.facts import differing
from kvweave.fuzzy.facts.reading import read
from kvweave.fuzzy.semantic.embedders import make_embedder

_HARD_NEGATIVES = ("negation", "entity_swap", "number_date", "scope")
_KINDS = {
    "false_serves": _HARD_NEGATIVES,
    "paraphrases_served": ("paraphrase",),
    "near_repeats_served": ("near_repeat",),
}
_ROUNDS = 5
_BATCH = 50


@dataclass(frozen=True, slots=True)
class Pair:
    """Two questions; `likeness` is the cosine of what they mean to the embedder.

    The facts gate was written looking at one half of the pairs; the other is `held_out`.
    """

    donor: str
    recipient: str
    kind: str
    held_out: bool
    likeness: float


Gate = Callable[[Pair], bool]
"""Whether a pair would be served."""


def measure(setting: Setting) -> list[Row]:
    """The same pairs at the same, default threshold: by cosine alone, and with each gate."""
    pairs = _pairs(setting)
    least = FuzzyConfig().fuzzy_semantic_threshold
    gates: dict[str, Gate] = {
        "cosine": lambda pair: pair.likeness >= least,
        "facts": lambda pair: (
            pair.likeness >= least and differing(pair.donor, pair.recipient) is None
        ),
        "facts, no cosine": lambda pair: differing(pair.donor, pair.recipient) is None,
    }
    known = [pair.likeness for pair in pairs if pair.kind in _HARD_NEGATIVES]
    gates["cosine, none false"] = lambda pair: pair.likeness > max(known, default=1.0)
    theirs = _semblend(setting)
    if theirs is not None:
        consistent = theirs
        gates["semblend"] = lambda pair: (
            pair.likeness >= least and consistent(pair.donor, pair.recipient)
        )
    rows = []
    for half, among in (("", pairs), ("_held_out", [pair for pair in pairs if pair.held_out])):
        for metric, kinds in _KINDS.items():
            of = [pair for pair in among if pair.kind in kinds]
            rows += [_count(metric + half, arm, gate, of) for arm, gate in gates.items() if of]
    return rows + _timings(pairs, theirs)


def _pairs(setting: Setting) -> list[Pair]:
    """The labelled pairs, `n` of them, with their likeness by the default embedder."""
    texts = setting.texts("fow-cache")
    ids = sorted(text.title for text in texts)
    random.Random(0).shuffle(ids)
    looked_at = frozenset(ids[: len(ids) // 2])
    chosen = random.Random(setting.seed).sample(texts, min(setting.n, len(texts)))
    embedder = make_embedder(FuzzyConfig().fuzzy_semantic_embedder)
    pairs = []
    with setting.progress("batches", -(-len(chosen) // _BATCH)) as advance:
        for at in range(0, len(chosen), _BATCH):
            batch = chosen[at : at + _BATCH]
            donors = embedder.encode([text.body for text in batch])
            recipients = embedder.encode([text.facts["other"] for text in batch])
            for text, donor, recipient in zip(batch, donors, recipients, strict=True):
                held_out = text.title not in looked_at
                kind, likeness = text.facts["category"], float(donor @ recipient)
                pairs.append(Pair(text.body, text.facts["other"], kind, held_out, likeness))
            advance()
    return pairs


def _semblend(setting: Setting) -> Callable[[str, str], bool] | None:
    """semblend's own fact gate, if that package is installed."""
    if find_spec("semblend_core") is None:
        setting.console.print("semblend is not installed, so its gate is not measured")
        return None
    gate: Callable[[str, str], bool] = importlib.import_module(
        "semblend_core.fact_gate"
    ).spans_fact_consistent
    return gate


def _count(metric: str, arm: str, gate: Gate, of: Sequence[Pair]) -> Row:
    served = sum(map(gate, of))
    return Row(metric=metric, arm=arm, value=float(served), unit="pairs", n=len(of))


def _timings(pairs: Sequence[Pair], theirs: Callable[[str, str], bool] | None) -> list[Row]:
    """Microseconds that a pair takes; nothing about it is remembered from the round before."""
    arms: dict[str, Callable[[str, str], object]] = {"facts": differing}
    if theirs is not None:
        arms["semblend"] = theirs
    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    with quiet_collector():
        for _ in range(_ROUNDS):
            read.cache_clear()
            for pair in pairs:
                for arm, gate in arms.items():
                    start = time.perf_counter()
                    gate(pair.donor, pair.recipient)
                    taken[arm].append(1e6 * (time.perf_counter() - start))
    return [row("microseconds_per_pair", arm, figures, "us") for arm, figures in taken.items()]


BENCH = Bench(
    name="paraphrase-gate",
    summary="Questions that mean the same, and hard negatives: which ones would be served",
    counts="labelled pairs",
    n=600,
    quick_n=60,
    measure=measure,
)
