"""Labelled pairs of questions, also as prompts from an engine to its cache's plan.

The engine is whole except for the model: forward passes compute nothing, since the plan says which
tokens would be served.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig
from kvweave.engine.attention.base import ForwardBatch
from kvweave.engine.engine import Engine
from kvweave.engine.execution.executor import EngineComponents
from kvweave.engine.factory import decoder
from kvweave.engine.types import Completion, GenerateRequest, SamplingParams
from kvweave.errors import KvweaveError
from kvweave.fuzzy.backend import FuzzyCache
from kvweave.kv.pool import PagePool
from kvweave.kv.relocation import MoveRun
from kvweave.models.load import LoadedModel
from kvweave.paraphrase.facts import Verifier
from kvweave.paraphrase.gate import ParaphraseGate
from kvweave.prefix.contract import CacheOptions
from kvweave_bench.setting import Setting

HARD_NEGATIVES = ("negation", "entity_swap", "number_date", "scope")
KINDS = {
    "false_serves": HARD_NEGATIVES,
    "paraphrases_served": ("paraphrase",),
    "near_repeats_served": ("near_repeat",),
}
"""Kinds of pairs by the metric that counts those served."""


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


_BATCH = 50
"""Pairs whose donors are cached together, each in namespaces of its own."""
_POOL_TOKENS, _PAGE = 65_536, 16
_PATIENCE = 300.0
"""Seconds. What is asked is which words are served, not how soon."""


def served_in_prompts(
    setting: Setting, pairs: Sequence[Pair], gates: Mapping[str, Verifier], config: FuzzyConfig
) -> dict[str, list[int]]:
    """By gate, for each pair: tokens of one that are served in the other's words, whichever of the
    two comes first; the more of both orders.

    Threshold, lengths, shares and all other rules are those of `config`; only what compares facts
    is exchanged. Donors are embedded once, and the same prompts asked of them behind each gate.
    """
    asker = _Asker(setting.loaded, config)
    served: dict[str, list[int]] = {variant: [] for variant in gates}
    with setting.progress("batches of prompts", -(-len(pairs) // _BATCH)) as advance:
        for at in range(0, len(pairs), _BATCH):
            batch = pairs[at : at + _BATCH]
            asker.teach(batch)
            for variant, gate in gates.items():
                served[variant] += asker.asked(batch, gate)
            advance()
    return served


class _Asker:
    """An engine that has read what customers asked; each pair and order is a customer."""

    def __init__(self, loaded: LoadedModel, config: FuzzyConfig) -> None:
        fuzzy = replace(config, provider="semantic", semantic_budget_ms=1e3 * _PATIENCE)
        pool = PagePool(_POOL_TOKENS // _PAGE, _PAGE)
        options = CacheOptions(fuzzy=fuzzy, decode=decoder(loaded.tokenizer))
        self._cache = FuzzyCache(pool, options, _Unmoved())
        cache = CacheConfig(prefix_cache_backend=FuzzyCache.name, page_size=_PAGE)
        components = EngineComponents(pool, self._cache, _Mute(loaded.vocab_size))
        self._engine = Engine(EngineConfig(cache=cache, fuzzy=fuzzy), loaded, components)
        self._encode = loaded.tokenizer.encode
        self._ids = itertools.count()

    def teach(self, pairs: Sequence[Pair]) -> None:
        """Serve the donors, and wait until they are known; everybody else's are forgotten."""
        self._engine.flush_cache()
        for customer, donor, _ in _orders(pairs):
            self._serve(customer, _FIRST, donor)
        if not self._cache.settle(_PATIENCE):
            raise KvweaveError("the embedder does not come to rest")

    def asked(self, pairs: Sequence[Pair], gate: Verifier) -> list[int]:
        judge = self._cache.paraphrases
        assert isinstance(judge, ParaphraseGate)
        judge.facts = gate
        found = [
            self._serve(customer, _SECOND, recipient) for customer, _, recipient in _orders(pairs)
        ]
        return [max(both) for both in zip(found[::2], found[1::2], strict=True)]

    def _serve(self, customer: str, opening: str, asked: str) -> int:
        """How many of the prompt's tokens are served in other words."""
        before = self._encode(f"{opening}{_BEFORE}{asked.strip()}\n{_BEHIND}")
        request = GenerateRequest(
            rid=f"desk-{next(self._ids)}",
            prompt_ids=(*before, *self._encode(_QUESTION, add_special_tokens=False)),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            cache_salt=customer,
            protected_from=len(before),
        )
        self._engine.add(request)
        answer = Completion()
        while self._engine.has_work:
            for delta in self._engine.step():
                answer.extend(delta)
        if answer.error is not None:
            raise KvweaveError(f"the engine gave up on a prompt: {answer.error}")
        if opening == _SECOND and not answer.usage.moved_tokens:
            raise KvweaveError("a prompt's own surroundings were not found in its donor")
        return answer.usage.paraphrase_tokens


def _orders(pairs: Sequence[Pair]) -> Iterator[tuple[str, str, str]]:
    for number, pair in enumerate(pairs):
        yield f"{number} as given", pair.donor, pair.recipient
        yield f"{number} turned", pair.recipient, pair.donor


class _Mute:
    """A model that thinks every token equally likely."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.zeros(len(batch.logits_at), self._vocab_size)


class _Unmoved:
    """There is no KV to be moved."""

    fixed_because = None

    def move(self, runs: Sequence[MoveRun]) -> None:
        pass


_FIRST = "Log of the first desk, Tuesday.\n\n"
_SECOND = "Log of the second desk, Wednesday, with what the night shift has added to it.\n\n"
_BEFORE = (
    "A customer rang early in the morning, and the line was not good. She gave her name and her "
    "number, and said that she had waited for a while. My colleague wrote down what she asked, and "
    "read it back to her:\n"
)
_BEHIND = (
    "We promised to write back within two days. Whoever takes this over should look into the file "
    "first, since she has been with us for many years. If anything is unclear, ask at the front "
    "desk before you write. Keep the answer short, and add where she can read more about it.\n\n"
)
_QUESTION = "Question: By when will the customer hear from us, and who knows more?\nAnswer:"
