"""A log that never keeps the server: what cannot be written now is written later, or is lost.

Whoever reads stderr may stop reading, its disk may be full, its pipe may be gone. A plain handler
would then hold up the event loop, and with it every answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from typing import TextIO

_MOST_LINES = 10_000
"""That wait to be written."""
_LAST_WORDS_SECONDS = 2.0
"""For what waits when the process ends."""


class PatientStream(logging.Handler):
    """Writes lines to `stream` on a thread of its own."""

    def __init__(self, stream: TextIO | None = None, most: int = _MOST_LINES) -> None:
        super().__init__()
        self._stream: TextIO | None = sys.stderr if stream is None else stream
        self._waiting: queue.Queue[str] = queue.Queue(most)
        self._lost = 0
        threading.Thread(target=self._write_all, name="kvweave-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Formats where it is said, since only there is known in whose request."""
        try:
            self._waiting.put_nowait(self.format(record))
        except queue.Full:
            self._lost += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all is written, or until it seems hopeless."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)

    def _write_all(self) -> None:
        while True:
            line = self._waiting.get()
            if self._lost:
                lost, self._lost = self._lost, 0
                line = f"{lost} lines of this log are lost: nobody read it\n{line}"
            # OSError: the disk is full or the pipe is gone; ValueError: the stream is closed.
            with contextlib.suppress(OSError, ValueError):
                self._write(f"{line}\n")
            self._waiting.task_done()

    def _write(self, text: str) -> None:
        if self._stream is None:  # as Python has it where the process began without
            return
        try:
            descriptor = self._stream.fileno()
        except OSError:  # it is no file, as in tests
            self._stream.write(text)
            return
        # Past the stream's own buffer, whose lock would be held while nobody reads: Python takes
        # that lock at its end, and would die of it.
        rest = text.encode("utf-8", "backslashreplace")
        while rest:
            rest = rest[os.write(descriptor, rest) :]
