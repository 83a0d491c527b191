"""Pairs of questions of which it is known whether they mean the same."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvweave_bench.setting import Setting

HARD_NEGATIVES = ("negation", "entity_swap", "number_date", "scope")
KINDS = {
    "false_serves": HARD_NEGATIVES,
    "paraphrases_served": ("paraphrase",),
    "near_repeats_served": ("near_repeat",),
}
"""By what it is called when one of them is served."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two questions. The facts gate was written looking at one half of all pairs; the other is
    `held_out`."""

    donor: str
    recipient: str
    kind: str
    held_out: bool


def labelled_pairs(setting: Setting) -> list[Pair]:
    """`n` of the pairs, as the seed chooses."""
    texts = setting.texts("fow-cache")
    ids = sorted(text.title for text in texts)
    random.Random(0).shuffle(ids)
    looked_at = frozenset(ids[: len(ids) // 2])
    chosen = random.Random(setting.seed).sample(texts, min(setting.n, len(texts)))
    return [
        Pair(text.body, text.facts["other"], text.facts["category"], text.title not in looked_at)
        for text in chosen
    ]
