"""Logging to stderr: plain lines or JSON objects, with the request's id where there is one.

One handler takes the lines of all loggers in the process (kvweave, uvicorn, Python's warnings) and
never blocks. Modules below the server may pass `extra={"rid": ...}`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

_MAX_LINES = 10_000
"""Lines that may wait to be written; later ones are dropped and counted."""
_FLUSH_SECONDS = 2.0
"""For waiting lines when the process ends."""


class QueuedStream(logging.Handler):
    """Writes lines to `stream` on a thread of its own, so that logging never blocks."""

    def __init__(self, stream: TextIO | None = None, max_lines: int = _MAX_LINES) -> None:
        super().__init__()
        self._stream: TextIO | None = sys.stderr if stream is None else stream
        self._waiting: queue.Queue[str] = queue.Queue(max_lines)
        self._lost = 0
        threading.Thread(target=self._write_all, name="kvweave-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Format here: the current request is known only on the caller's side."""
        try:
            self._waiting.put_nowait(self.format(record))
        except queue.Full:
            self._lost += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all is written, at most _FLUSH_SECONDS."""
        deadline = time.monotonic() + _FLUSH_SECONDS
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
        if self._stream is None:  # Python's sys.stderr if the process has none
            return
        try:
            descriptor = self._stream.fileno()
        except OSError:  # not a file, as in tests
            self._stream.write(text)
            return
        # Not through the stream's buffer: its lock would be held while the pipe is full, and Python
        # aborts if it cannot take that lock at exit.
        rest = text.encode("utf-8", "backslashreplace")
        while rest:
            rest = rest[os.write(descriptor, rest) :]


current_rid: ContextVar[str | None] = ContextVar("kvweave_rid", default=None)
"""The rid of the request that the current task works for."""


class LogFields:
    """A message made of facts: members of the object in JSON, `name=value` in text.

    In text, values with spaces or quotes are quoted as in JSON.
    """

    def __init__(self, title: str, **facts: str | float | None) -> None:
        self.title = title
        self.facts = facts

    def __str__(self) -> str:
        return " ".join(f"{name}={_plain(value)}" for name, value in self.facts.items())


def _plain(value: str | float | None) -> str:
    text = "-" if value is None else str(value)
    return json.dumps(text, ensure_ascii=False) if set(text) & set(' "\\\n') else text


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC), level, logger, rid, message, and LogFields' members."""

    def format(self, record: logging.LogRecord) -> str:
        facts = record.msg if isinstance(record.msg, LogFields) else None
        moment = datetime.fromtimestamp(record.created, UTC)
        rid = getattr(record, "rid", None) or current_rid.get()
        shown: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **({"rid": rid} if rid is not None else {}),
            "message": facts.title if facts else record.getMessage(),
            **(facts.facts if facts else {}),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown)


def configure_logging(level: str, form: str) -> None:
    """Log from `level` on, in the `form` text or json, unless the root logger has handlers."""
    handler = QueuedStream()
    if form == "json":
        handler.setFormatter(JsonFormatter())
        logging.captureWarnings(True)
        _join_transformers()
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _join_transformers() -> None:
    """Route transformers' lines through the root logger; by default it has its own handler."""
    from transformers.utils import logging as theirs  # here: importing takes a second

    theirs.disable_default_handler()
    theirs.enable_propagation()
