"""The log: lines for people, or one JSON object per line, with the request's id where there is one.

Everything in the process goes through one handler on stderr, which waits for nobody: our own
loggers, uvicorn's, Python's warnings. Modules below the server know nothing of it; they may say
`extra={"rid": ...}`.
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


current_rid: ContextVar[str | None] = ContextVar("kvweave_rid", default=None)
"""The request in whose task something is logged."""


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
    """One object per line: time (UTC), level, logger, rid, message, and what a LogFields holds."""

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
    """Log from `level` on, in the `form` text or json, unless the process has a log already."""
    handler = PatientStream()
    if form == "json":
        handler.setFormatter(JsonFormatter())
        logging.captureWarnings(True)
        _join_transformers()
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _join_transformers() -> None:
    """transformers writes lines of its own, past the root logger, unless told otherwise."""
    from transformers.utils import logging as theirs  # here: it takes a second

    theirs.disable_default_handler()
    theirs.enable_propagation()
