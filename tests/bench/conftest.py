"""A corpus made of small local texts: the builders are tested without any package registry."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvweave_bench.workloads.corpus import MANUALS, Corpus


def encode(text: str) -> list[int]:
    """Words and line breaks as tokens; enough for builders that never look inside a token."""
    return [zlib.crc32(word.encode()) % 50_000 for word in re.findall(r"\S+|\n+", text)]


def _keep(folder: Path, name: str, texts: list[dict[str, object]]) -> None:
    made = {"source": name, "origin": f"{name} 1", "licence": "test", "texts": texts}
    (folder / f"{name}.json").write_text(json.dumps(made))


@pytest.fixture
def make_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Corpus]:
    """Corpora by seed; the same seed gives the same walk."""
    monkeypatch.setenv("KVWEAVE_CACHE", str(tmp_path))
    folder = tmp_path / "texts"
    folder.mkdir()
    rng = np.random.default_rng(7)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(4000)]

    def body(n: int) -> str:
        lines = [" ".join(rng.choice(words, 60)) for _ in range(n // 60)]
        return "\n\n".join(lines)

    for name in MANUALS:
        _keep(folder, name, [{"title": name, "body": body(12_000), "facts": {}}])
    documents = [{"title": f"Card {at}", "body": body(600), "facts": {}} for at in range(12)]
    _keep(folder, "banking", documents)
    countries = []
    for number in range(60):
        facts = {"capital": f"City{number}", "population": f"{number}000", "area": f"{number}7"}
        if number % 3 == 0:  # sources have gaps
            del facts["population"], facts["area"]
        filler = " ".join(rng.choice(words, 40))
        sentences = " ".join(f"Its {key} is {value} ." for key, value in facts.items())
        countries.append({"title": f"C{number}", "body": f"{filler} {sentences}", "facts": facts})
    _keep(folder, "countries", countries)
    return lambda seed: Corpus(encode, seed)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tiny, with room for whole prompts; its tokenizer knows bytes."""
    from transformers import LlamaConfig

    from support.tinymodels import VOCABULARY, save

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
    )
    return str(save(config, tmp_path_factory.mktemp("model") / "tiny"))
