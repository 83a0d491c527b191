"""A world whose tokens are words, with an embedder that knows which words mean the same."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvweave.config import FuzzyConfig
from kvweave.kv.pool import IntArray
from kvweave.paraphrase import semantic as semantic
from kvweave.paraphrase.semantic import SemanticProvider
from kvweave.prefix.lease import Tier
from support.fuzzy_world import SMALL, Running, World

SEMANTIC = replace(
    SMALL,
    provider="semantic",
    semantic_budget_ms=10_000.0,
    semantic_max_share=1.0,
)
SAME = {"kid": "child", "trip": "journey", "needs": "requires", "big": "large", "quick": "fast"}


class Words:
    """A vocabulary that grows: words and marks, numbered as they come."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        found = re.findall(r"<\w+>|\n|\w+|[^\w\s]", text)
        for word in found:
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in found]

    def decode(self, ids: IntArray) -> str:
        words = (self.words[token] for token in ids.tolist())
        return "".join(w if re.fullmatch(r"[^\w<]", w) else f" {w}" for w in words)


class Meaning:
    """Bags of words, where words of the same meaning are the same."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.fails = False

    def encode(self, texts: Sequence[str]) -> Any:
        if self.fails:
            raise RuntimeError("no meaning today")
        self.texts += texts
        found = np.zeros((len(texts), 64), np.float32)
        for row, text in zip(found, texts, strict=True):
            for word in re.findall(r"\w+", text.lower()):
                row[zlib.crc32(SAME.get(word, word).encode()) % 64] += 1
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-9)


class SemanticWorld(World):
    """A `World` in words. Served in other words: the donor's tokens, at the recipient's places."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        config: FuzzyConfig = SEMANTIC,
        num_pages: int = 256,
        page_size: int = 4,
    ) -> None:
        self.text = Words()
        self.meaning = Meaning()
        monkeypatch.setattr(semantic, "EmbedderProcess", lambda name: self.meaning)
        monkeypatch.setattr("kvweave.paraphrase.embedding_queue._QUIET", 0.02)
        super().__init__(num_pages, page_size, config, decode=self.text.decode)

    @property
    def provider(self) -> SemanticProvider:
        found = self.cache._guard._provider
        assert isinstance(found, SemanticProvider)
        return found

    def settle(self) -> None:
        assert self.cache.settle(20)

    def teach(self, text: str, **more: Any) -> Running:
        """Serve a prompt, and wait until it can be a donor by meaning."""
        running = self.serve(self.text.encode(text), **more)
        self.settle()
        return running

    def ask(self, text: str, **more: Any) -> Running:
        """Start a prompt whose last ten words are the question."""
        tokens = self.text.encode(text)
        more.setdefault("protected_from", len(tokens) - 10)
        return self.start(tokens, **more)

    def look_at(self, running: Running) -> None:
        plan, tokens = running.lease.plan, running.view.tokens.copy()
        for span in plan.spans:
            if span.tier is Tier.PARAPHRASE:
                tokens[span.start : span.end] = self.donor_tokens(span.donor, span.donor_start)[
                    : span.length
                ]
        view, running.view = running.view, replace(running.view, tokens=tokens)
        super().look_at(running)
        running.view = view

    def donor_tokens(self, donor: int, start: int) -> IntArray:
        node = self.cache._donors.named(donor)
        assert node is not None
        return self.cache._donors.tokens(int(node.pages[-1]), start)

    def said(self, running: Running) -> list[str]:
        """What the model reads where other words were served."""
        spans = running.lease.plan.spans
        return [
            self.text.decode(self.donor_tokens(span.donor, span.donor_start)[: span.length]).strip()
            for span in spans
            if span.tier is Tier.PARAPHRASE
        ]

    def refused(self) -> dict[str, int]:
        return dict(self.cache.paraphrases.declined)


def story(seed: int, sentences: int = 8) -> str:
    """Made-up sentences, the same for the same seed."""
    rng = np.random.default_rng(seed)
    return " ".join(
        " ".join(f"w{word}" for word in rng.integers(0, 5000, 7)) + "." for _ in range(sentences)
    )


QUESTION = "\nWhat does the note above say about all of it?"
