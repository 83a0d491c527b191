"""What a client of AsyncEngine iterates over: the deltas of one request's answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from kvweave.engine.types import OutputDelta


class AnswerStream(AsyncIterator[OutputDelta]):
    """Ends when all answers have. Closing, cancelling or forgetting it earlier aborts the request.

    Belongs to the event loop on which it was made, which is the only one to touch it, except for
    `loop`, `rid` and the end of its life.
    """

    _unfinished = 0
    """Answers still to come; at first none, so that a half-made stream can be forgotten."""

    def __init__(self, rid: str, answers: int, on_abandoned: Callable[[str], None]) -> None:
        self.rid = rid
        self.loop = asyncio.get_running_loop()
        self._unfinished = answers
        self._arrived: deque[OutputDelta] = deque()
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        self._on_abandoned = on_abandoned

    @property
    def finished(self) -> bool:
        """Nothing more will arrive; any thread may ask."""
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
        """Want no more; aborts what has not ended. Twice is harmless."""
        self._abandon()
        self._arrived.clear()

    def deliver(self, delta: OutputDelta) -> None:
        """On the stream's loop."""
        if self._unfinished:
            self._arrived.append(delta)
            self._unfinished -= delta.finish_reason is not None
            self._news.set()

    def fail(self, failure: Exception) -> None:
        """On the stream's loop: after what has arrived, raise `failure` instead of going on."""
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
