"""Chooses the next token of every row of a batch.

Log probabilities are those of the model's own distribution: before penalties, bias, temperature and
filters, as OpenAI reports them. A seed decides by itself: the random number of a sequence's n-th
token depends on its seed and n only, so neither the rest of the batch nor a preemption changes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvweave.engine.sampling.grammar import GrammarMatcher
from kvweave.engine.sampling.logits import (
    Adjuster,
    Changes,
    adjusts,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    likeliest,
    mask_logits,
    token_logprobs,
)
from kvweave.engine.types import SamplingParams, TokenLogprob
from kvweave.errors import KvweaveError
from kvweave.kv.pool import IntArray

_GREEDY_BELOW = 1e-5
"""Dividing by a smaller temperature would overflow; the likeliest token is what it asks for."""


class SamplingState:
    """How one answer chooses tokens: parameters, seed, and the state after its tokens so far."""

    __slots__ = ("adjuster", "drawn", "ending", "grammar", "greedy", "params", "seed")

    def __init__(
        self,
        params: SamplingParams,
        prompt: IntArray,
        ending: Iterable[int],
        seed: int,
        grammar: GrammarMatcher | None = None,
    ) -> None:
        """`ending`: tokens that would end the answer; `seed`: any 64 bits."""
        self.params = params
        self.ending = frozenset(ending)
        self.grammar = grammar
        self.seed = seed % 2**64
        self.drawn = 0
        self.greedy = params.temperature < _GREEDY_BELOW
        self.adjuster = Adjuster(params, prompt, self.ending) if adjusts(params) else None

    def record(self, token: int) -> None:
        """The answer goes on with `token`."""
        if self.grammar is not None and token not in self.ending:
            self.grammar.accept(token)
        self.drawn += 1
        if self.adjuster is not None:
            self.adjuster.add(token)

    def ahead(self, draft: Sequence[int]) -> list[SamplingState]:
        """This state, and for each token of `draft` the state after it: fewer where one would end
        the answer, or is not allowed by the grammar.
        """
        states = [self]
        if self.grammar is not None and draft:
            draft = draft[: self.grammar.allowed_run(draft)]
        for token in draft:
            if token in self.ending:
                break
            state = copy(states[-1])
            if state.adjuster is not None:
                state.adjuster = state.adjuster.twin()
            if state.grammar is not None:
                state.grammar = state.grammar.twin()
            state.record(token)
            if state.grammar is not None and state.grammar.finished:
                break
            states.append(state)
        return states


@dataclass(slots=True)
class SampledTokens:
    """By row: the token, and its log probability if wanted. Rows in `errors` have neither."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    errors: dict[int, Exception] = field(default_factory=dict)


def sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> SampledTokens:
    """Choose one token per row of `logits`, float32 (R, V), which may be overwritten."""
    errors: dict[int, Exception] = {}
    raw = _raw_logprobs(logits, states)
    _adjust(logits, states, errors)
    best, chosen = likeliest(logits)
    if masked := _to_mask(best, chosen, states):
        errors |= mask_logits(logits, masked)
        rows = [row for row, _ in masked]
        best[rows], chosen[rows] = likeliest(logits[rows])
    random = [row for row, state in enumerate(states) if not state.greedy]
    if random:
        chosen[random] = _draw(logits[random], [states[row] for row in random])
    for row in (~best.isfinite()).nonzero().squeeze(-1).tolist():
        state = states[row]
        errors[row] = errors.get(row) or KvweaveError(
            "the model's output holds no valid numbers"
            if state.adjuster is None and state.grammar is None
            else "the request leaves no token to choose (allowed_token_ids, bad_words, logit_bias, "
            "min_tokens and grammar together), or the model's output holds no valid numbers"
        )
    token_ids = chosen.tolist()
    return SampledTokens(token_ids, _logprobs_of(raw, token_ids, states), errors)


def uniforms(
    seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) that depend on (seed, counter) only: SplitMix64's output at that place.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014, figure 16.
    """
    z = _mix(seeds) + (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(z) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _adjust(
    logits: torch.Tensor, states: Sequence[SamplingState], errors: dict[int, Exception]
) -> None:
    changes = Changes()
    for row, state in enumerate(states):
        if state.adjuster is not None:
            try:
                state.adjuster.collect(row, changes)
            except Exception as error:  # one request's own fault
                errors[row] = error
    changes.apply(logits)


def _to_mask(
    best: torch.Tensor, chosen: torch.Tensor, states: Sequence[SamplingState]
) -> list[tuple[int, GrammarMatcher]]:
    """Rows that need the mask of their grammar. A greedy row whose likeliest token is allowed does
    not: that token is also the likeliest of the allowed ones.
    """
    bound = [(row, s.grammar) for row, s in enumerate(states) if s.grammar is not None]
    if not any(states[row].greedy for row, _ in bound):
        return bound
    tokens, finite = chosen.tolist(), best.isfinite().tolist()
    return [
        (row, grammar)
        for row, grammar in bound
        if not (states[row].greedy and finite[row] and grammar.surely_allows(tokens[row]))
    ]


def _draw(logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    """One token per row, int64 (R), by inverting the distribution. Overwrites `logits`."""
    params = [state.params for state in states]
    device = logits.device
    logits /= torch.tensor([[p.temperature] for p in params], device=device)
    if any(p.min_p > 0 for p in params):
        keep_min_p(logits, torch.tensor([p.min_p for p in params], device=device))
    if any(p.top_k > 0 for p in params):
        keep_top_k(logits, torch.tensor([p.top_k for p in params], device=device))
    if any(p.top_p < 1 for p in params):
        keep_top_p(logits, torch.tensor([p.top_p for p in params], device=device))
    # In the vocabulary's order, which no numerical noise can change, as an order by likelihood
    # could; and in float64, since 100,000 float32 sums would lose the rare tokens.
    mass = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    seeds = np.array([state.seed for state in states], np.uint64)
    counters = np.array([state.drawn for state in states], np.uint64)
    wanted = torch.from_numpy(uniforms(seeds, counters)).to(device).unsqueeze(-1) * mass[:, -1:]
    chosen = torch.searchsorted(mass, wanted, right=True).squeeze(-1)
    return chosen.clamp_(max=logits.shape[-1] - 1)


def _raw_logprobs(
    logits: torch.Tensor, states: Sequence[SamplingState]
) -> tuple[list[int], torch.Tensor] | None:
    rows = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    return (rows, logits[rows].log_softmax(dim=-1)) if rows else None


def _logprobs_of(
    raw: tuple[list[int], torch.Tensor] | None,
    token_ids: list[int],
    states: Sequence[SamplingState],
) -> list[TokenLogprob | None]:
    result: list[TokenLogprob | None] = [None] * len(token_ids)
    if raw is not None:
        rows, logprobs = raw
        counts = [states[row].params.logprobs or 0 for row in rows]
        found = token_logprobs(logprobs, [token_ids[row] for row in rows], counts)
        for row, logprob in zip(rows, found, strict=True):
            result[row] = logprob
    return result
