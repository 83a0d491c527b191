"""The log: lines for people, or one JSON object per line, with the request's id where there is one.

Everything in the process goes through one handler on stderr, which waits for nobody: our own
loggers, uvicorn's, Python's warnings. Modules below the server know nothing of it; they may say
`extra={"rid": ...}`.
"""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from kvweave.server.log_stream import PatientStream

current_rid: ContextVar[str | None] = ContextVar("kvweave_rid", default=None)
"""The request in whose task something is logged."""


class Facts:
    """A message that is made of facts: members of the object in JSON, `name=value` in text."""

    def __init__(self, title: str, **facts: str | float | None) -> None:
        self.title = title
        self.facts = facts

    def __str__(self) -> str:
        return " ".join(
            f"{name}={'-' if value is None else value}" for name, value in self.facts.items()
        )


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC), level, logger, rid, message, and what a Facts holds."""

    def format(self, record: logging.LogRecord) -> str:
        facts = record.msg if isinstance(record.msg, Facts) else None
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
