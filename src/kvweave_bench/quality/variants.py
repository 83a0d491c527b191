"""Variants that are compared: ways of serving moved text, and ablations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvweave.config import FuzzyConfig, SchedulerConfig
from kvweave.errors import KvweaveError
from kvweave.kv.relocation import KVMover, MoveRun, TensorMover
from kvweave.kv.tensors import KVTensors

COPY, RERUN, ZERO_MASK, UNROTATED = "copy", "rerun", "zero-mask", "unrotated"
DEFAULT = "default"
ABLATIONS = (ZERO_MASK, UNROTATED)
_WITHOUT_BUDGET = (COPY, DEFAULT, RERUN, *ABLATIONS)
_MASKED_SHARE = 0.15
_RERUN_CHUNK = 192


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy of refreshing moved text, and its budget: a share of the reused tokens.

    `default` is what a server does without flags. `copy` refreshes nothing. Two strategies are
    ablations, which a server does not offer: `zero-mask` blanks the outermost layers of what is
    moved, `unrotated` leaves keys turned as they were at the donor's positions. `rerun` reuses
    nothing: the same prompt is computed again, in chunks of another size, which is the noise that
    any busy server makes.
    """

    strategy: str
    budget: float = 0.0

    @property
    def name(self) -> str:
        return DEFAULT if self.strategy == DEFAULT else f"{self.strategy}/{self.budget:g}"

    @property
    def backend(self) -> str:
        return "none" if self.strategy == RERUN else "fuzzy_match"

    @property
    def ablation(self) -> bool:
        return self.strategy in ABLATIONS

    @property
    def fuzzy(self) -> FuzzyConfig:
        changes: dict[str, Any] = {} if self.strategy == DEFAULT else {"refresh_tokens": 0}
        if self.ablation:
            changes["share_span"] = 0  # they change what is copied
        if self.strategy not in _WITHOUT_BUDGET:
            changes |= {"refresh": self.budget, "refresh_strategy": self.strategy}
        return replace(FuzzyConfig(), **changes)

    @property
    def scheduler(self) -> SchedulerConfig:
        if self.strategy == RERUN:
            return SchedulerConfig(chunked_prefill_size=_RERUN_CHUNK)
        return SchedulerConfig()

    def mover(self, kv: KVTensors) -> KVMover:
        """What moves KV in this variant's engine."""
        mover = TensorMover(kv)
        if self.strategy == ZERO_MASK:
            return _Changed(mover, zeroed=outer_layers(len(kv.layouts)))
        return _Changed(mover, delta=0) if self.strategy == UNROTATED else mover


def parse_variants(text: str) -> list[Variant]:
    """Arms out of `strategy/budget,strategy/budget`; KvweaveError for what is none."""
    return [_parse(part.strip()) for part in text.split(",")]


def _parse(text: str) -> Variant:
    strategy, slash, budget = text.partition("/")
    try:
        variant = Variant(strategy, float(budget) if slash else 0.0)
    except ValueError as error:
        raise KvweaveError(f"--arms takes strategy/budget, as in copy/0, not {text!r}") from error
    if not 0 <= variant.budget <= 1 or (variant.budget and strategy in _WITHOUT_BUDGET):
        most = "0" if strategy in _WITHOUT_BUDGET else "a share from 0 to 1"
        raise KvweaveError(f"the budget of {strategy} is {most}, not {budget}")
    if strategy not in _WITHOUT_BUDGET:
        # Tell now what an engine would tell much later.
        found = variant.fuzzy.problems()
        if found:
            raise KvweaveError(f"{text}: {found[0]}")
    return variant


def outer_layers(layers: int) -> frozenset[int]:
    """The first and the last 15 % of the layers, at least one at each end."""
    edge = max(1, round(_MASKED_SHARE * layers))
    return frozenset(layer for layer in range(layers) if min(layer, layers - 1 - layer) < edge)


class _Changed:
    """Moves KV after a change to every run."""

    def __init__(self, mover: KVMover, **changes: Any) -> None:
        self._mover = mover
        self._changes = changes

    @property
    def refusal(self) -> str | None:
        return self._mover.refusal

    def move(self, runs: Sequence[MoveRun]) -> None:
        self._mover.move([replace(run, **self._changes) for run in runs])
