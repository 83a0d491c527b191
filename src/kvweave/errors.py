"""The errors that kvweave raises on purpose; each message tells the person who caused it why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class KvweaveError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(KvweaveError):
    """Flags that cannot work; `problems` names all of them, so that one start finds them all."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class UnsupportedModelError(KvweaveError):
    """The model, or a combination of model and flag, cannot be served; the message says why."""


class RequestError(KvweaveError):
    """A request that cannot be served as asked.

    `param` names the offending field as the client wrote it; `status` is the HTTP status that
    a server should answer with (400 unless something fits better).
    """

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code


class OverloadedError(RequestError):
    """The queue is full; try again after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message, status=429, code="queue_full")
        self.retry_after = retry_after


class EngineDeadError(KvweaveError):
    """The engine stopped for good; nothing more will be answered."""


class ForwardInterruptedError(KvweaveError):
    """A forward pass stopped between two layers, because its caller asked for that."""


class IntegrityError(KvweaveError):
    """Pages, locks or counters do not add up: a bug in kvweave, never a user's."""


def extra(name: str) -> str:
    """The command that installs what an optional feature needs.

    kvweave is on no package index. A checkout is installed again with the extra; what was
    installed from a wheel is completed, since pip finds that kvweave itself is there.
    """
    checkout = (Path(__file__).parents[2] / "pyproject.toml").exists()
    return f"pip install '{'.' if checkout else 'kvweave'}[{name}]'"


def reason(error: BaseException) -> str:
    """The message of a foreign exception in one line, for quoting in a message of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
