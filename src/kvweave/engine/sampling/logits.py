"""Changes logits before sampling: filters, penalties, bias, grammars; and log probabilities.

Filters are min_p, top_k and top_p, in this order, each on the distribution that the one before it
left, after the temperature. Each sets the logits of the tokens that it drops to minus infinity, in
place, row by row with its own parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np
import numpy.typing as npt
import torch

from kvweave.engine.sampling.grammar import GrammarMatcher
from kvweave.engine.types import SamplingParams, TokenLogprob
from kvweave.kv.pool import IntArray

_CANDIDATES = 256
"""Tokens that nearly always hold a row's top_p mass. Finding them takes a fiftieth of a sort."""


def keep_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Drop tokens less likely than `min_p` (R), in [0, 1], times the likeliest of logits (R, V)."""
    least = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(-1)
    logits.masked_fill_(logits < least, -torch.inf)


def keep_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> None:
    """Keep the `top_k` likeliest, and all that equal the last of them. top_k int64 (R), 0: all."""
    vocabulary = logits.shape[-1]
    k = torch.where(top_k > 0, top_k, vocabulary).clamp_(max=vocabulary)
    limited = (k < vocabulary).nonzero().squeeze(-1)
    if not len(limited):
        return
    k = k[limited]
    rows = logits[limited]
    best = rows.topk(int(k.max()), dim=-1).values
    least = best.gather(-1, (k - 1).unsqueeze(-1))
    logits[limited] = rows.masked_fill_(rows < least, -torch.inf)


def keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """Keep the fewest, likeliest tokens whose mass reaches `top_p` (R), and ties of the last.

    Nucleus sampling, arXiv 1904.09751.
    """
    _keep_top_p(logits, top_p, (top_p < 1).nonzero().squeeze(-1), _CANDIDATES)


def _keep_top_p(
    logits: torch.Tensor, top_p: torch.Tensor, rows: torch.Tensor, candidates: int
) -> None:
    if not len(rows):
        return
    chosen, wanted = logits[rows], top_p[rows].unsqueeze(-1)
    candidates = min(candidates, chosen.shape[-1])
    best = chosen.topk(candidates, dim=-1).values
    mass = (best - chosen.logsumexp(dim=-1, keepdim=True)).exp_().cumsum(dim=-1)
    # The last candidate that is kept is the first whose mass, with all before it, reaches top_p.
    last = (mass < wanted).sum(dim=-1, keepdim=True)
    enough = (last < candidates).squeeze(-1)
    if candidates == chosen.shape[-1]:
        enough.fill_(True)
        last.clamp_(max=candidates - 1)
    least = best.gather(-1, last.clamp(max=candidates - 1))
    kept = chosen.masked_fill(chosen < least, -torch.inf)
    logits[rows[enough]] = kept[enough]
    _keep_top_p(logits, top_p, rows[~enough], 16 * candidates)


class TokenCounts:
    """The distinct tokens of a sequence and how often the output holds each; O(1) per token."""

    def __init__(self, seen: IntArray) -> None:
        """`seen`: tokens that count as seen from the start, without being output."""
        distinct = np.unique(seen)
        self._size = len(distinct)
        self._ids = np.empty(max(64, 2 * self._size), np.int64)
        self._ids[: self._size] = distinct
        self._counts = np.zeros(len(self._ids), np.float32)
        self._place = dict(zip(distinct.tolist(), range(self._size), strict=True))

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._ids = np.resize(self._ids, 2 * place)
                self._counts = np.resize(self._counts, 2 * place)
            self._ids[place], self._counts[place] = token, 0
            self._size += 1
        self._counts[place] += 1

    def twin(self) -> TokenCounts:
        """A copy of the counts, which changes independently."""
        twin = copy(self)
        twin._ids, twin._counts = self._ids.copy(), self._counts.copy()
        twin._place = self._place.copy()
        return twin

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Occurrences in the output, by the order of `ids`."""
        return self._counts[: self._size]


class Adjuster:
    """What one sequence changes in its logits, in this order:

    - repetition penalty r over prompt and output (CTRL, arXiv 1909.05858): a positive logit is
      divided by r, a negative one multiplied;
    - minus frequency penalty times occurrences in the output, minus presence penalty if there is
      any (the formula of OpenAI's API reference);
    - plus the request's logit_bias;
    - tokens outside `allowed_token_ids` are impossible;
    - a token that would complete one of `bad_words_ids` is impossible;
    - until `min_tokens` are there, the tokens that would end the answer are impossible.
    """

    def __init__(self, params: SamplingParams, prompt: IntArray, ending: Iterable[int]) -> None:
        self.params = params
        seen = prompt if params.repetition_penalty != 1 else prompt[:0]
        self._counts = TokenCounts(seen) if penalises(params) else None
        bias = params.logit_bias or {}
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float32, len(bias))
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else np.unique(np.array(allowed, np.int64))
        self._ending = np.array(sorted(ending), np.int64)
        self._output: list[int] = []
        self._generated = 0

    def add(self, token: int) -> None:
        """Take note of a token of the output."""
        self._generated += 1
        if self.params.bad_words_ids:
            self._output.append(token)
        if self._counts is not None:
            self._counts.add(token)

    def twin(self) -> Adjuster:
        """A copy of the state, which changes independently."""
        twin = copy(self)
        twin._output = self._output.copy()
        twin._counts = None if self._counts is None else self._counts.twin()
        return twin

    def collect(self, row: int, changes: Changes) -> None:
        """Add what applies to the next token of the sequence, whose logits are in `row`."""
        if self._counts is not None:
            changes.penalties.append((row, self._counts, self.params))
        if len(self._bias_ids):
            changes.biases.append((row, self._bias_ids, self._bias))
        if self._allowed is not None:
            changes.allowed.append((row, self._allowed))
        if self.params.bad_words_ids and len(completing := self._completing()):
            changes.forbidden.append((row, completing))
        if self._generated < self.params.min_tokens and len(self._ending):
            changes.forbidden.append((row, self._ending))

    def _completing(self) -> npt.NDArray[np.int64]:
        """Tokens that would complete a bad word now."""
        output = self._output
        last = [
            word[-1]
            for word in self.params.bad_words_ids
            if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]
        ]
        return np.unique(np.array(last, np.int64))


def penalises(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
    )


def adjusts(params: SamplingParams) -> bool:
    """Whether the logits are ever changed; most requests need no Adjuster."""
    return (
        penalises(params)
        or bool(params.logit_bias)
        or params.min_tokens > 0
        or params.allowed_token_ids is not None
        or bool(params.bad_words_ids)
    )


class Changes:
    """The changes of all rows of a batch, applied by a few scatters whatever their number."""

    def __init__(self) -> None:
        self.penalties: list[tuple[int, TokenCounts, SamplingParams]] = []
        self.biases: list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32]]] = []
        self.allowed: list[tuple[int, npt.NDArray[np.int64]]] = []
        self.forbidden: list[tuple[int, npt.NDArray[np.int64]]] = []

    def apply(self, logits: torch.Tensor) -> None:
        """Change `logits` (rows, vocabulary) in place."""
        if self.penalties:
            self._penalise(logits)
        if self.biases:
            where = _Where(logits, [(row, ids) for row, ids, _ in self.biases])
            where.write(where.read() + where.tensor([bias for _, _, bias in self.biases]))
        if self.allowed:
            where = _Where(logits, self.allowed)
            kept = where.read()
            logits[[row for row, _ in self.allowed]] = -torch.inf
            where.write(kept)
        if self.forbidden:
            where = _Where(logits, self.forbidden)
            where.write(torch.full_like(where.read(), -torch.inf))

    def _penalise(self, logits: torch.Tensor) -> None:
        where = _Where(logits, [(row, counts.ids) for row, counts, _ in self.penalties])
        counts = where.tensor([counts.counts for _, counts, _ in self.penalties])
        params = [params for _, _, params in self.penalties]
        repetition = where.spread([p.repetition_penalty for p in params])
        value = where.read()
        value = torch.where(value > 0, value / repetition, value * repetition)
        value -= where.spread([p.frequency_penalty for p in params]) * counts
        value -= where.spread([p.presence_penalty for p in params]) * (counts > 0)
        where.write(value)


class _Where:
    """Places in logits: some tokens of some rows, as one index."""

    def __init__(
        self, logits: torch.Tensor, places: list[tuple[int, npt.NDArray[np.int64]]]
    ) -> None:
        self._logits = logits
        self._lengths = [len(ids) for _, ids in places]
        rows = np.repeat(np.array([row for row, _ in places], np.int64), self._lengths)
        ids = np.concatenate([ids for _, ids in places])
        self._index = (
            torch.from_numpy(rows).to(logits.device),
            torch.from_numpy(ids).to(logits.device),
        )

    def tensor(self, per_place: list[npt.NDArray[np.float32]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(per_place)).to(self._logits.device)

    def spread(self, per_row: list[float]) -> torch.Tensor:
        return self.tensor([np.repeat(np.array(per_row, np.float32), self._lengths)])

    def read(self) -> torch.Tensor:
        return self._logits[self._index]

    def write(self, values: torch.Tensor) -> None:
        self._logits[self._index] = values


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest logit of each row (R, V), and the first token that has it. A NaN is greatest."""
    if logits.device.type != "cpu":
        return logits.max(dim=-1)
    # numpy finds it in a tenth of torch's time.
    chosen = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), chosen


_LIMITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(np.inf),
    np.float32(-np.inf),
)
"""By eight bits of a mask: the greatest logits that their tokens may have."""


def mask_logits(
    logits: torch.Tensor, matchers: Sequence[tuple[int, GrammarMatcher]]
) -> dict[int, Exception]:
    """Make what the grammars of some rows of `logits` (R, V) forbid impossible, in place.

    Returns errors by row: they concern that row only.
    """
    errors: dict[int, Exception] = {}
    vocabulary = logits.shape[-1]
    limits = np.empty((-(-vocabulary // 8), 8), np.float32)
    for row, matcher in matchers:
        try:
            mask = matcher.mask().view(np.uint8)[: len(limits)]
        except Exception as error:
            errors[row] = error
            mask = np.zeros(len(limits), np.uint8)
        # clip: without checks of bounds. fmin: also a forbidden NaN becomes impossible.
        _LIMITS.take(mask, axis=0, out=limits, mode="clip")
        limit, values = limits.reshape(-1)[:vocabulary], logits[row]
        if values.device.type == "cpu":
            np.fmin(values.numpy(), limit, out=values.numpy())  # a tenth of masked_fill_'s time
        else:
            torch.fmin(values, torch.from_numpy(limit).to(values.device), out=values)
    return errors


_BLOCK = 32
"""Rows of a prompt whose whole distributions exist at a time."""


def token_logprobs(
    logprobs: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprob]:
    """One result per row of `logprobs` (R, V), with the row's `counts` best alternatives."""
    chosen = torch.tensor(token_ids, device=logprobs.device).unsqueeze(-1)
    own = logprobs.gather(-1, chosen).squeeze(-1).tolist()
    most = min(max(counts, default=0), logprobs.shape[-1])
    best = logprobs.topk(most, dim=-1)
    ids, values = best.indices.tolist(), best.values.tolist()
    tops = [
        tuple(zip(ids[row][:count], values[row][:count], strict=True))
        for row, count in enumerate(counts)
    ]
    return [TokenLogprob(*parts) for parts in zip(token_ids, own, tops, strict=True)]


def prompt_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], count: int
) -> list[TokenLogprob]:
    """How likely each of `token_ids` was, given `logits` (R, V) of the position before it."""
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), _BLOCK):
        block = token_ids[start : start + _BLOCK]
        logprobs = logits[start : start + len(block)].log_softmax(dim=-1)
        found += token_logprobs(logprobs, block, [count] * len(block))
    return found
