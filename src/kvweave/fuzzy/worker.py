"""Calls into code that may never come back: on a thread of their own, waited for just so long."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

_Result = TypeVar("_Result")
_Inbox: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"


class LateError(Exception):
    """The call has not come back yet, or one before it has not."""


class Worker:
    """One thread, one call at a time; its caller always comes back in time.

    A call that is given up on goes on until it ends by itself, and until then every other is late.
    The thread is a daemon: a call that never ends does not keep the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox: _Inbox = SimpleQueue()
        self._last: Future[Any] | None = None
        weakref.finalize(self, self._inbox.put, None)

    def run(self, call: Callable[[], _Result], seconds: float) -> _Result:
        """What `call` returns or raises; LateError after `seconds`."""
        if self._last is None:
            thread = threading.Thread(target=_work, args=(self._inbox,), name=self._name)
            thread.daemon = True
            thread.start()
        elif not self._last.done():
            raise LateError
        future: Future[_Result] = Future()
        self._last = future
        self._inbox.put((future, call))
        try:
            future.exception(seconds)  # waits, and does not raise what the call raised
        except FutureTimeoutError:
            raise LateError from None
        return future.result()


def _work(inbox: _Inbox) -> None:
    while (job := inbox.get()) is not None:
        future, call = job
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del job, future, call  # or they would be kept until the next one comes
