"""Runs a small model in a subprocess of low priority.

In the engine's process the model would compete for the interpreter, torch's threads and the
processor. A subprocess of low priority takes only idle time, and its faults stay in it.

`python -m MODULE ARGUMENTS` is the subprocess. It calls `serve`: for every line of JSON on its
input it writes the shape of a matrix and the matrix, until the input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

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
