"""An embedder in a process of its own, which yields to everybody else.

In this process it would compete with the engine for the interpreter, for torch's threads and for
the processor. A process of low priority gets what the engine leaves, and whatever goes wrong in it
stays there.

`python -m kvweave.fuzzy.semantic.process minilm` is that process: it reads a line of JSON (a list
of texts) and writes the shape of its vectors, then the vectors; until its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import IO

import numpy as np

from kvweave.fuzzy.semantic.embedders import Vectors, check_embedder, make_embedder

_SHAPE = struct.Struct("<II")
_NICENESS = 5
_MODEST = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}
"""One thread, nothing from elsewhere, no bars on the server's screen."""


class EmbedderProcess:
    """An Embedder that works elsewhere, for one thread at a time. It begins to load at once."""

    def __init__(self, name: str) -> None:
        """ConfigError if the embedder is not installed."""
        check_embedder(name)
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._started()

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Raises RuntimeError if the process died; the next call starts another."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(list(texts)).encode() + b"\n")
            process.stdin.flush()
            rows, columns = _SHAPE.unpack(_exactly(process.stdout, _SHAPE.size))
            raw = _exactly(process.stdout, 4 * rows * columns)
        except (OSError, EOFError, struct.error) as error:
            self.close()
            raise RuntimeError(f"the embedder {self._name} has died") from error
        return np.frombuffer(raw, np.float32).reshape(rows, columns)

    def close(self) -> None:
        """End the process. Twice is harmless."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, self._name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | _MODEST | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
            weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
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


def main() -> None:
    """Serve until the input ends."""
    # Whatever libraries print must not get between the vectors.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    embedder = make_embedder(sys.argv[1])
    embedder.encode(["What loads late has loaded now."])
    if hasattr(os, "nice"):  # not before: the engine loads at the same time
        os.nice(_NICENESS)
    for line in sys.stdin.buffer:
        vectors = np.ascontiguousarray(embedder.encode(json.loads(line)), np.float32)
        answers.write(_SHAPE.pack(*vectors.shape) + vectors.tobytes())
        answers.flush()


if __name__ == "__main__":
    main()
