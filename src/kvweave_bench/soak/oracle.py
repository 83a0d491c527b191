"""Judges answers by the model itself, computed without a cache in a separate process.

A greedy answer is right if each of its tokens is the likeliest after all before it. That needs one
forward pass over prompt and answer, whatever batch the server computed it in. Tokens may differ
only where two are likely alike, within rounding.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

CLOSE = 1e-3
"""Logits so near to each other may change places by rounding."""
ALIKE = 2e-3
"""So near log probabilities are the same."""

_model: transformers.PreTrainedModel


@dataclass(frozen=True, slots=True)
class Claim:
    """`answer` is what was chosen after `prompt`; `logprobs` what the server says of its first
    tokens, if it does."""

    prompt: Sequence[int]
    answer: Sequence[int]
    logprobs: Sequence[float] = ()
    from_start: bool = False
    """`logprobs` begin with the prompt's second token."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """`wrong` is the first token that is not the likeliest; `ties` those that are within CLOSE."""

    ties: int = 0
    wrong: int | None = None
    gap: float = 0.0
    """How much likelier another was."""
    worst_logprob: float = 0.0


def load(folder: Path) -> None:
    """Once in the judge's process, which leaves it to others to be interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    global _model
    torch.set_num_threads(1)
    _model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.inference_mode()
def judge(claims: Sequence[Claim]) -> list[Judgement]:
    """One for each, in order."""
    return [_judged(claim) for claim in claims]


def _judged(claim: Claim) -> Judgement:
    tokens = torch.tensor([[*claim.prompt, *claim.answer]])
    start = len(claim.prompt)
    logits = _model(tokens, use_cache=False).logits[0, :-1]
    chosen = logits.gather(1, tokens[0, 1:, None]).squeeze(1)
    gaps = (logits.max(1).values - chosen)[start - 1 :]
    wrong = (gaps > CLOSE).nonzero()
    worst = 0.0
    if claim.logprobs:
        first = 0 if claim.from_start else start - 1
        known = (chosen - logits.logsumexp(1))[first:][: len(claim.logprobs)]
        said = torch.tensor(claim.logprobs[: len(known)])
        worst = float((said - known).abs().max())
    ties = int(((gaps > 0) & (gaps <= CLOSE)).sum())
    if len(wrong):
        at = int(wrong[0])
        return Judgement(ties, at, float(gaps[at]), worst)
    return Judgement(ties, worst_logprob=worst)
