"""Which replica should answer: the one that saves the most work, less the work that waits there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvweave.cluster.overlap import Overlap

_Replica = TypeVar("_Replica")


@dataclass(frozen=True, slots=True)
class Weights:
    """`moved`: what a moved token is worth, an exact one being worth 1.

    `load`: what a token of work that waits weighs against one that is saved. Below 1, since what
    waits is over soon, and what is computed in a second place takes room there for long.

    `least_share`: overlap below this share of the prompt is ignored. A system prompt that all
    share would else draw every new conversation to where the first one went.
    """

    moved: float = 0.7
    load: float = 0.25
    least_share: float = 0.25


@dataclass(frozen=True, slots=True)
class Standing:
    """How a replica stands towards one prompt. All in tokens."""

    overlap: Overlap
    load: int
    """Work that it was given and has not finished."""
    kept: int
    """What its cache holds."""


def score(standing: Standing, length: int, weights: Weights) -> float:
    """Tokens that this replica saves, less what stands in the way."""
    saved = standing.overlap.exact + weights.moved * standing.overlap.moved
    worth = saved if saved >= weights.least_share * length else 0.0
    return worth - weights.load * standing.load


def ranked(standings: Mapping[_Replica, Standing], length: int, weights: Weights) -> list[_Replica]:
    """Best first. Of equals, the one that keeps least: so new conversations spread."""

    def order(replica: _Replica) -> tuple[float, int]:
        standing = standings[replica]
        return -score(standing, length, weights), standing.kept

    return sorted(standings, key=order)
