"""An async iterator over the deltas of one request's answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from kvweave.engine.types import OutputDelta


class AnswerStream(AsyncIterator[OutputDelta]):
    """Ends when all answers have. Closing, cancelling or dropping it earlier aborts the request.

    Only the event loop on which it was made may use it; other threads may read `loop`, `rid` and
    `finished`, and set `aborted`.
    """

    _unfinished = 0
    """Answers still to come; 0 until `__init__` sets it, since `__del__` reads it."""

    def __init__(self, rid: str, answers: int, on_abandoned: Callable[[str], None]) -> None:
        self.rid = rid
        self.loop = asyncio.get_running_loop()
        self.aborted = False
        """Whether the request is to end as soon as it exists."""
        self._unfinished = answers
        self._arrived: deque[OutputDelta] = deque()
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        self._on_abandoned = on_abandoned

    @property
    def finished(self) -> bool:
        """Whether nothing more will arrive; any thread may ask."""
        return not self._unfinished

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> OutputDelta:
        while not self._arrived:
            if self._failure is not None:
                raise self._failure
            if not self._unfinished:
                raise StopAsyncIteration
            self._news.clear()
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                self._abandon()
                raise
        return self._arrived.popleft()

    async def aclose(self) -> None:
        """Abort the answers that have not ended. Idempotent."""
        self._abandon()
        self._arrived.clear()

    def deliver(self, delta: OutputDelta) -> None:
        """Add a delta; call it on the stream's loop."""
        if self._unfinished:
            self._arrived.append(delta)
            self._unfinished -= delta.finish_reason is not None
            self._news.set()

    def fail(self, failure: Exception) -> None:
        """Raise `failure` after the deltas that have arrived; call it on the stream's loop."""
        if self._unfinished:
            self._unfinished = 0
            self._failure = failure
            self._news.set()

    def _abandon(self) -> None:
        if self._unfinished:
            self._unfinished = 0
            self._on_abandoned(self.rid)

    def __del__(self) -> None:
        self._abandon()
