"""Variants that are compared: ways of serving moved text, and ablations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvweave.config import FuzzyConfig, SchedulerConfig
from kvweave.errors import KvweaveError
from kvweave.fuzzy.recompute import BESIDE_CHOICE, STRATEGIES
from kvweave.kv.relocation import KVMover, MoveRun, TensorMover
from kvweave.kv.tensors import KVTensors
from kvweave.models import LoadedModel

COPY, RERUN, ZERO_MASK, UNROTATED = "copy", "rerun", "zero-mask", "unrotated"
DEFAULT, ROUNDED = "default", "rounded"
ABLATIONS = (ZERO_MASK, UNROTATED)
_WITHOUT_BUDGET = (COPY, DEFAULT, RERUN, ROUNDED, *ABLATIONS)
_MASKED_SHARE = 0.15
_RERUN_CHUNK = 192


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy of refreshing moved text, and its budget: a share of the reused tokens.

    `default` is what a server does without flags. `copy` refreshes nothing. Two strategies are
    ablations, which a server does not offer: `zero-mask` blanks the outermost layers of what is
    moved, `unrotated` leaves keys turned as they were at the donor's positions. `rerun` reuses
    nothing: the same prompt is computed again, in chunks of another size, which is the noise that
    any busy server makes. `rounded` reuses nothing either, and its keys and values are kept in
    float32 where the others' are bfloat16, else in bfloat16: the divergence that any change of
    rounding makes, to read the others' beside it.
    """

    strategy: str
    budget: float = 0.0

    @property
    def name(self) -> str:
        return DEFAULT if self.strategy == DEFAULT else f"{self.strategy}/{self.budget:g}"

    @property
    def backend(self) -> str:
        return "none" if self.strategy in (RERUN, ROUNDED) else "fuzzy_match"

    @property
    def ablation(self) -> bool:
        """Nothing that a server offers, or no reuse."""
        return self.strategy in (*ABLATIONS, ROUNDED)

    def of(self, loaded: LoadedModel) -> LoadedModel:
        """The model as this variant's engine has it."""
        if self.strategy != ROUNDED:
            return loaded
        others = torch.float32 if loaded.kv_dtype == torch.bfloat16 else torch.bfloat16
        return replace(loaded, kv_dtype=others)

    @property
    def fuzzy(self) -> FuzzyConfig:
        if self.strategy == DEFAULT:
            return FuzzyConfig()
        changes: dict[str, Any] = {"refresh": self.budget}
        if self.ablation:
            changes["share_span"] = 0  # they change what is copied
        if self.strategy not in _WITHOUT_BUDGET:
            changes["refresh_strategy"] = self.strategy
        deferred = self.strategy in STRATEGIES and STRATEGIES[self.strategy].deferred
        changes["refresh_tokens"] = BESIDE_CHOICE if deferred and self.budget else 0
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
    known = (*STRATEGIES, *_WITHOUT_BUDGET)
    if strategy not in known:
        raise KvweaveError(f"--arms: there is no {strategy!r}; there are {', '.join(known)}")
    try:
        variant = Variant(strategy, float(budget) if slash else 0.0)
    except ValueError as error:
        raise KvweaveError(f"--arms takes strategy/budget, as in copy/0, not {text!r}") from error
    if not 0 <= variant.budget <= 1 or (variant.budget and strategy in _WITHOUT_BUDGET):
        most = "0" if strategy in _WITHOUT_BUDGET else "a share from 0 to 1"
        raise KvweaveError(f"the budget of {strategy} is {most}, not {budget}")
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
    def fixed_because(self) -> str | None:
        return self._mover.fixed_because

    def move(self, runs: Sequence[MoveRun]) -> None:
        self._mover.move([replace(run, **self._changes) for run in runs])
