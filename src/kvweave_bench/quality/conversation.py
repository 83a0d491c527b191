"""The scenario session-20: a conversation whose head changes every turn, against cold turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvweave.engine.selfcheck.measure import kl_divergence
from kvweave.kv.pool import IntArray
from kvweave_bench.measure import quiet_collector
from kvweave_bench.quality.chat import Chat
from kvweave_bench.quality.metrics import bootstrap, perplexity_ratio
from kvweave_bench.quality.session import Session
from kvweave_bench.quality.summary import Figure, row_of
from kvweave_bench.quality.variants import DEFAULT, Variant
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting

NAME = "session-20"
TURNS = 20
REPORTED = (2, 5, 10, 20)
"""Turns whose divergence is told apart."""

_DOCUMENT, _SAID, _ANSWER = 1024, 96, 24
"""Tokens of the document, of what the user adds every turn, and of an answer at most."""
_SLOTS = 32_768
KEYED, WITHOUT = DEFAULT, f"{DEFAULT}-no-key"


@dataclass(slots=True)
class _Turns:
    """Figures of one variant, by turn, a chain after another."""

    kl: dict[int, list[float]] = field(default_factory=dict)
    ppl: dict[int, list[float]] = field(default_factory=dict)
    reused: list[float] = field(default_factory=list)
    of_earlier: list[float] = field(default_factory=list)
    """Reused tokens by those that earlier turns said: the head and this turn's text are new."""
    against_radix: list[float] = field(default_factory=list)
    """First token of radix with a head that never changes, by this variant's."""
    against_cold: list[float] = field(default_factory=list)


class _Chain:
    """One conversation in the variants: all are led along the cold answers."""

    def __init__(self, setting: Setting, number: int) -> None:
        loaded, model = setting.loaded, setting.model_config
        self._corpus = setting.corpus
        self._chat = Chat(loaded.tokenizer, setting.corpus.tokens)
        self._key = f"chain-{number}"
        self._document = self._corpus.take(_DOCUMENT)
        self._history: list[tuple[str, IntArray]] = []
        self._stable = self._head()
        self.cold = Session(loaded, model, None, _SLOTS)
        self.radix = Session(loaded, model, None, _SLOTS, backend="radix")
        self.variants = {
            name: Session(loaded, model, Variant(DEFAULT), _SLOTS) for name in (KEYED, WITHOUT)
        }

    def _head(self) -> IntArray:
        """What agents put in front: lines that nobody has seen before, of other length."""
        return self._corpus.take(int(self._corpus.rng.integers(24, 72)))

    def turn(self, number: int, found: dict[str, _Turns]) -> None:
        """One turn in every variant; the cold answer becomes part of the conversation."""
        said = self._corpus.take(_SAID)
        if number == 1:
            said = np.concatenate([self._document, said])
        self._history.append(("user", said))
        earlier = sum(len(text) for _, text in self._history) - len(said)
        prompt = self._chat.prompt(("system", self._head()), *self._history)
        steady = self._chat.prompt(("system", self._stable), *self._history)
        reference = self.cold.serve(prompt, _ANSWER)
        tokens = reference.trace.tokens
        with quiet_collector():
            radix = self.radix.serve(steady, len(tokens), tokens)
        cold = reference.answer.first_token_seconds
        for name, session in self.variants.items():
            key = self._key if name == KEYED else None
            with quiet_collector():
                served = session.serve(prompt, len(tokens), tokens, session=key)
            usage, figures = served.answer.usage, found[name]
            divergence = kl_divergence(reference.trace.logits, served.trace.logits)
            figures.kl.setdefault(number, []).append(float(divergence[0]))
            figures.ppl.setdefault(number, []).append(
                perplexity_ratio(reference.trace.logits, served.trace.logits, tokens)
            )
            if number > 1:
                reused = usage.cached_tokens + usage.moved_tokens + usage.refreshed_tokens
                figures.reused.append(reused / usage.prompt_tokens)
                figures.of_earlier.append(reused / earlier)
                ours = served.answer.first_token_seconds
                figures.against_radix.append(radix.answer.first_token_seconds / ours)
                figures.against_cold.append(cold / ours)
        self._history.append(("assistant", np.array(tokens, np.int32)))


def measure_sessions(setting: Setting, advance: Callable[[], None]) -> list[Row]:
    """`setting.n` // 8 chains (one at least); `advance` is called once per turn."""
    found = {name: _Turns() for name in (KEYED, WITHOUT)}
    for number in range(chains(setting)):
        chain = _Chain(setting, number)
        for turn in range(1, turns(setting) + 1):
            chain.turn(turn, found)
            advance()
    return [row for name, figures in found.items() for row in _rows(name, figures)]


def chains(setting: Setting) -> int:
    return max(1, setting.n // 8)


def turns(setting: Setting) -> int:
    return 3 if setting.quick else TURNS


def _rows(name: str, figures: _Turns) -> list[Row]:
    arm = f"{NAME}/{name}"
    found = [
        (arm, Figure("reused_share", bootstrap(figures.reused), "share of the prompt")),
        (arm, Figure("reused_of_earlier", bootstrap(figures.of_earlier), "x earlier turns' text")),
        (
            arm,
            Figure("reused_share_least", bootstrap([min(figures.reused)]), "share of the prompt"),
        ),
        (arm, Figure("first_token_speedup", bootstrap(figures.against_cold, "median"), "x")),
        (arm, Figure("first_token_of_radix", bootstrap(figures.against_radix, "median"), "x")),
    ]
    for turn in REPORTED:
        if turn in figures.kl:
            at = f"{arm}/turn-{turn}"
            found.append((at, Figure("kl_mean", bootstrap(figures.kl[turn]), "nats")))
            found.append((at, Figure("ppl_ratio", bootstrap(figures.ppl[turn]), "x")))
    later = [value for turn, kl in figures.kl.items() if turn > 1 for value in kl]
    found.append((arm, Figure("kl_mean", bootstrap(later), "nats")))
    return [row_of(*each) for each in found]
