"""An embedder in a process of its own: `python -m kvweave.paraphrase.embedder_process minilm`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvweave.paraphrase.embedders import Vectors, check_embedder, make_embedder
from kvweave.paraphrase.model_subprocess import ModelSubprocess, serve


class EmbedderProcess:
    """An Embedder that works elsewhere, for one thread at a time. It begins to load at once."""

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


if __name__ == "__main__":
    serve(lambda: make_embedder(sys.argv[1]).encode, ["What loads late has loaded now."])
