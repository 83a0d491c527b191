"""What a forward pass says about each row: its prompt's log probabilities, its next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvweave.engine.batch import LongArray
from kvweave.engine.logprobs import prompt_logprobs
from kvweave.engine.packing import RowLogits
from kvweave.engine.request import Sequence as Sampled
from kvweave.engine.sampler import SamplingState, sample
from kvweave.engine.types import TokenLogprob


@dataclass(slots=True)
class Outcome:
    """One row's share. `error` is this row's own fault; the others go on."""

    scores: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt tokens after the row's scored positions."""
    token: int | None = None
    logprob: TokenLogprob | None = None
    chosen: LongArray | None = None
    """With a screen: the positions that it chose to compute again."""
    error: Exception | None = None
    computed: bool = True
    """False: `error` is the forward pass's, and no KV is there."""
    logged: bool = False
    """The log holds the traceback of `error` already."""


def read_out(
    logits: torch.Tensor, wanted: Sequence[RowLogits], states: Mapping[Sampled, SamplingState]
) -> list[Outcome]:
    """Outcomes by row; `logits` may be overwritten. An exception concerns the whole batch."""
    outcomes = [Outcome() for _ in wanted]
    for part, outcome in zip(wanted, outcomes, strict=True):
        if len(part.scored):
            _score(logits, part, outcome)
    sampled = [part for part in wanted if part.sampled is not None]
    if not sampled:
        return outcomes
    at = [part.sampled for part in sampled]
    if len(at) < len(logits):
        logits = logits[at]
    result = sample(logits, [states[part.row.sequence] for part in sampled])
    chosen = iter(range(len(sampled)))
    for part, outcome in zip(wanted, outcomes, strict=True):
        if part.sampled is not None:
            row = next(chosen)
            outcome.token = result.token_ids[row]
            outcome.logprob = result.logprobs[row]
            outcome.error = outcome.error or result.errors.get(row)
    return outcomes


def _score(logits: torch.Tensor, part: RowLogits, outcome: Outcome) -> None:
    sequence = part.row.sequence
    count = sequence.group.request.sampling.prompt_logprobs or 0
    following = sequence.tokens[part.scored + 1].tolist()
    rows = logits[part.first : part.first + len(following)]
    try:
        outcome.scores = prompt_logprobs(rows, following, count)
    except Exception as error:
        outcome.error = error
