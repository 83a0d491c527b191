"""Tests of the model subprocess: it answers with matrices, and ends with its owner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvweave.paraphrase.embedders import ModelSubprocess

LENGTHS = """
import numpy as np
from kvweave.paraphrase.embedders import serve

def lengths(texts):
    print("printed by a library")
    return np.array([[len(text)] for text in texts], np.float32)

if __name__ == "__main__":
    serve(lambda: lengths, ["warm"])
"""


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSubprocess:
    (tmp_path / "lengths.py").write_text(LENGTHS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return ModelSubprocess("counting process", "lengths")


def test_it_answers_closes_and_comes_back_after_it_was_killed(counter: ModelSubprocess) -> None:
    assert counter.ask(["a", "bcd\n"]).tolist() == [[1.0], [4.0]]
    [process] = counter._running
    process.kill()
    process.wait()
    with pytest.raises(RuntimeError, match="the counting process has died"):
        counter.ask(["a"])
    found = counter.ask(["ab"])
    assert found.dtype == np.float32
    assert found.tolist() == [[2.0]]
    [process] = counter._running
    counter.close()
    counter.close()
    assert process.poll() is not None


def test_exit_during_an_embedding_prints_nothing() -> None:
    """Also when the subprocess was started again."""
    code = """
import sys, time
from kvweave.paraphrase.embedding_queue import EmbeddingQueue
from kvweave.paraphrase.embedders import ModelSubprocess
from kvweave.prefix.lease import Namespace

class Embedder:
    def __init__(self):
        self.process = ModelSubprocess("embedder", "time")
        self.process.close()
        self.process._command[1:] = ["-c", "import time; time.sleep(600)"]
    def encode(self, texts):
        return self.process.ask(texts)

queue = EmbeddingQueue(Embedder(), quiet=0.01)
queue.vectors(Namespace("m"), ["a"], 0.01)
while not queue._working:
    time.sleep(0.01)
time.sleep(0.2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
