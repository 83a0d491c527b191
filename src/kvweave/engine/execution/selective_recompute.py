"""Selective recompute: selects moved tokens to recompute and prunes the others between layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvweave.engine.attention.base import AttentionBatch, ForwardBatch, LayerCall, RecomputeRequest
from kvweave.fuzzy.donors import slots_of
from kvweave.fuzzy.recompute import STRATEGIES
from kvweave.kv.tensors import KVTensors


class TokenPruning:
    """Prunes all tensors with one row per token to the tokens that a selector keeps.

    attention, logits_at: of the pass as it begins, over the tokens that the selector keeps then.
    `logits_at` is changed in place, since the model already holds it; `begin` gets every new
    attention batch.
    """

    def __init__(
        self,
        selector: RecomputeSelector,
        attention: AttentionBatch,
        logits_at: torch.Tensor,
        begin: Callable[[AttentionBatch], None],
    ) -> None:
        self._selector = selector
        self._full = attention
        self._begin = begin
        self._logits_at = logits_at
        self._wanted = logits_at.clone()
        self._first = self._kept = selector.kept
        self._before = len(self._kept)
        self._due = False
        self._from_full = self._from_last = torch.empty(0, dtype=torch.int64)
        self._pruned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Results by the identity of what was given: every layer is given the same positions."""

    def observe(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, kv: KVTensors
    ) -> None:
        """See RecomputeSelector.observe. Its decision holds from the next layer on."""
        self._due = self._selector.observe(layer, key, value, slots, kv) or self._due

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """An argument of a decoder layer: (1, tokens, ...) if it holds something per token."""
        if self._due:
            self._prune()
        now = len(self._kept)
        if tensor.dim() < 2 or len(self._first) == now or tensor.shape[0] != 1:
            return tensor
        if tensor.shape[1] == self._full.tokens:
            known = self._pruned.get(id(tensor))
            if known is None:
                known = (tensor, tensor.index_select(1, self._from_full))
                self._pruned[id(tensor)] = known
            return known[1]
        if tensor.shape[1] == self._before and self._before != now:
            return tensor.index_select(1, self._from_last)
        return tensor

    def _prune(self) -> None:
        device = self._full.positions.device
        last, kept = self._kept, self._selector.kept
        from_full = torch.searchsorted(self._first, kept)
        self._from_full = from_full.to(device)
        self._from_last = torch.searchsorted(last, kept).to(device)
        self._before, self._kept, self._due = len(last), kept, False
        self._pruned.clear()
        self._logits_at.copy_(torch.searchsorted(self._from_full, self._wanted))
        full = self._full
        self._begin(
            replace(
                full,
                positions=full.positions[self._from_full],
                slots=full.slots[self._from_full],
                query_start=torch.searchsorted(
                    self._from_full, full.query_start.long(), out_int32=True
                ),
                tokens=len(kept),
            )
        )


_ASKING = 8
"""The last tokens of a prompt whose attention is measured: the answer begins behind them."""
_READING = (0.5, 5 / 6)
"""Between these depths attention retrieves from the context, see docs/quality.md."""
_TINY = 1e-30


class QuestionAttention:
    """Attention that the last tokens of `rows` pay to moved tokens, whose KV is used as it is.

    `batch` holds the tokens to compute for it: all of those rows except the candidates.
    """

    def __init__(
        self, batch: ForwardBatch, recompute: RecomputeRequest, rows: list[int], kv: KVTensors
    ) -> None:
        layers = len(kv.layouts)
        self.rows = rows
        self._layers = range(round(_READING[0] * layers), max(1, round(_READING[1] * layers)))
        fresh = np.zeros(batch.tokens, np.bool_)
        for row in rows:
            own = slice(*batch.query_start[row : row + 2])
            fresh[own] = ~recompute.candidates[own]
        self.batch = batch.only(np.flatnonzero(fresh))
        self._seen = [_Seen.of(self.batch, row, kv.device) for row in rows]

    def see(self, query: torch.Tensor, kv: KVTensors, call: LayerCall) -> None:
        """One layer's queries (T, heads, key_dim), after its keys have been written."""
        if call.layer in self._layers:
            for seen in self._seen:
                seen.add(query, kv, call)

    def mass(self, row: int) -> torch.Tensor:
        """float32, by position of the row: mean share of attention over layers and heads."""
        return self._seen[self.rows.index(row)].mass.cpu()


@dataclass(slots=True)
class _Seen:
    """One row's last queries and the positions that they attend to."""

    queries: slice
    behind: torch.Tensor
    """int64 (queries, positions), how far each position lies behind each query"""
    slots: torch.Tensor
    mass: torch.Tensor

    @classmethod
    def of(cls, batch: ForwardBatch, row: int, device: torch.device) -> _Seen:
        first, end = (int(at) for at in batch.query_start[row : row + 2])
        first = max(first, end - _ASKING)
        at = torch.from_numpy(batch.positions[first:end])
        count = int(batch.positions[end - 1]) + 1
        table = batch.pages[batch.page_start[row] : batch.page_start[row + 1]]
        slots = slots_of(table, batch.page_size, 0, count)
        return cls(
            slice(first, end),
            (at[:, None] - torch.arange(count)).to(device),
            torch.from_numpy(slots).long().to(device),
            torch.zeros(count, device=device),
        )

    def add(self, query: torch.Tensor, kv: KVTensors, call: LayerCall) -> None:
        # (kv heads, dim, positions)
        key = kv.read_keys(call.layer, self.slots, query.dtype).permute(1, 2, 0)
        q = query[self.queries]
        count, heads, dim = q.shape
        group = heads // len(key)
        q = q.view(count, len(key), group, dim).permute(1, 2, 0, 3).reshape(len(key), -1, dim)
        scores = (torch.bmm(q, key).float() * call.scale).view(heads, count, -1)
        hidden = self.behind < 0
        if call.window is not None:
            hidden |= self.behind >= call.window
        sinks = None if call.sinks is None else call.sinks.view(heads, 1, 1)
        self.mass += call.weights(scores, hidden, sinks).mean((0, 1))


class RecomputeSelector:
    """Chooses in one forward pass. Indices of tokens are those of `batch`."""

    def __init__(
        self,
        batch: ForwardBatch,
        recompute: RecomputeRequest,
        question: QuestionAttention | None,
        layers: int,
    ) -> None:
        self._rows = [
            _Row.of(batch, recompute, row, question, layers)
            for row, strategy in enumerate(recompute.strategies)
            if strategy is not None
        ]
        self._fixed = ~recompute.candidates
        for row in () if question is None else question.rows:
            # All but the candidates was computed with the question just now. What the choice does
            # to the prompt's end matters, since the answer begins there; the rest stays as it is.
            begin, end = batch.query_start[row : row + 2]
            behind = end - int(np.argmax(recompute.candidates[begin:end][::-1]))
            self._fixed[begin:behind] = False
        self._chosen = recompute.chosen
        self.kept = torch.arange(batch.tokens)
        self.kept = self._alive()
        """Tokens that go on, int64, ascending."""

    @property
    def stops(self) -> bool:
        """Whether tokens may fall out between layers."""
        return any(row.stops for row in self._rows)

    def observe(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, kv: KVTensors
    ) -> bool:
        """Compare a layer's fresh KV, (tokens, kv heads, dim), with the pool's, not yet written.

        The tokens are those of `kept`; True if fewer of them go on now.
        """
        fewer = False
        for row in self._rows:
            keep = row.stops.get(layer)
            if keep is None:
                continue
            at = torch.searchsorted(self.kept, row.at).to(slots.device)
            there = slots[at]
            score = _deviation(key[at], kv.read_keys(layer, there))
            score += _deviation(value[at], kv.read_values(layer, there))
            fewer |= row.keep(score.cpu(), row.count(keep))
        if fewer:
            self.kept = self._alive()
        return fewer

    def _alive(self) -> torch.Tensor:
        alive = self._fixed.copy()
        for row in self._rows:
            alive[row.at] = True
            if not row.settled and len(row.at) <= row.budget:
                # Later stops prune it further, but this is what the budget counts.
                row.settled = True
                self._chosen[row.at] = True
        return torch.from_numpy(np.flatnonzero(alive))


@dataclass(slots=True)
class _Row:
    at: torch.Tensor
    """int64, ascending: candidates that still go on."""
    weight: torch.Tensor
    """float32, of each of them."""
    budget: int
    total: int
    """How many candidates there were."""
    stops: dict[int, float]
    settled: bool = False
    """Its choice is made."""

    @classmethod
    def of(
        cls,
        batch: ForwardBatch,
        recompute: RecomputeRequest,
        row: int,
        question: QuestionAttention | None,
        layers: int,
    ) -> _Row:
        begin, end = batch.query_start[row : row + 2]
        budget = int(recompute.budget[row])
        at = begin + np.flatnonzero(recompute.candidates[begin:end] & (budget > 0))
        strategy = STRATEGIES[recompute.strategies[row] or ""]
        weight = torch.ones(len(at))
        if question is not None and row in question.rows:
            mass = question.mass(row)[torch.from_numpy(batch.positions[at])]
            weight = (mass / mass.mean().clamp_min(_TINY)) ** strategy.question
        stops = strategy.stops_by_layer(layers)
        found = cls(torch.from_numpy(at), weight, budget, len(at), stops)
        if strategy.entry and question is not None and row in question.rows:
            found.keep(torch.ones(len(at)), found.count(strategy.entry))
        return found

    def count(self, keep: float) -> int:
        """How many go on at a stop: all if the budget is all, and never none.

        Without any token left the remaining layers would have nothing to compute.
        """
        share = self.budget / max(self.total, 1)
        return max(1, round(self.budget * (keep if keep >= 1 else keep + (1 - keep) * share)))

    def keep(self, score: torch.Tensor, count: int) -> bool:
        """Let the `count` with the highest weighted scores go on; False if that is everyone."""
        if count >= len(self.at):
            return False
        best = (score * self.weight).topk(count).indices.sort().values
        self.at, self.weight = self.at[best], self.weight[best]
        return True


def question_rows(batch: ForwardBatch, recompute: RecomputeRequest) -> list[int]:
    """Rows whose strategy uses the question's attention and whose last token is in `batch`."""
    lasts = set(batch.logits_at.tolist())
    return [
        row
        for row, strategy in enumerate(recompute.strategies)
        if strategy is not None
        and STRATEGIES[strategy].question
        and int(batch.query_start[row + 1]) - 1 in lasts
    ]


def _deviation(fresh: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """Squared distance of each token's (heads, dim), relative to the mean over tokens."""
    apart = (fresh.float() - moved.float()).square_().sum((1, 2))
    return apart / apart.mean().clamp_min(_TINY)
