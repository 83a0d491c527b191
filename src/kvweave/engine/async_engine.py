"""Runs an engine on a thread of its own; asyncio clients iterate over streams of its deltas."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from kvweave.engine.engine import Engine
from kvweave.engine.types import EngineSnapshot, GenerateRequest, OutputDelta
from kvweave.errors import EngineDeadError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher


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


logger = logging.getLogger("kvweave.engine")

_POLL_SECONDS = 0.02
"""Between two checks whether the engine is idle or has stopped."""

_T = TypeVar("_T")
_Task: TypeAlias = tuple[Callable[[], Any], "Future[Any]"]
"""A call to make between two steps, and its result."""


class AsyncEngine:
    """Owns an Engine and the only thread that touches it.

    Calls of other threads wait in an inbox until the current step ends. The deltas of a step go to
    each event loop in one call. Methods may be called from any event loop.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams: WeakValueDictionary[str, AnswerStream] = WeakValueDictionary()
        """By rid, for clients: the latest stream of that rid."""
        self._readers: WeakValueDictionary[str, AnswerStream] = WeakValueDictionary()
        """By rid, for the engine's thread. It differs while a step still works for a closed stream:
        its deltas must not reach the next stream of the same rid."""
        self._thread = threading.Thread(target=self._work, name="kvweave-engine", daemon=True)
        self._inbox: deque[_Task] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        """Guards `_open` together with `_inbox`, and `_queued`."""
        self._open = True
        self._queued = 0
        """Requests in the inbox."""
        self._compilers = ThreadPoolExecutor(2, "kvweave-grammar")
        engine.on_background_progress(self._wake.set)
        self._accepting = self._stopping = self._blind = False
        self._snapshot = engine.snapshot()

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self._engine.loaded.tokenizer

    @property
    def alive(self) -> bool:
        """Whether requests are answered: from `start` until `stop` or a breakdown."""
        return self._thread.is_alive() and not self._engine.dead

    def snapshot(self) -> EngineSnapshot:
        """Gauges and counters as of the last step or change."""
        return self._snapshot

    async def start(self) -> None:
        """Start the thread; call it once."""
        # Now, since reading the vocabulary holds up all threads for a moment.
        await asyncio.to_thread(self._engine.grammars.prepare)
        self._accepting = True
        self._thread.start()

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Accept nothing more, finish what runs for up to `drain_seconds`, abort the rest."""
        self._accepting = False
        deadline = time.monotonic() + drain_seconds
        while self._unfinished() and self.alive and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        for stream in self._unfinished():
            self.abort(stream.rid)
        self._stopping = True
        self._wake.set()
        while self._thread.is_alive():  # polled, not joined: callers may cancel
            await asyncio.sleep(_POLL_SECONDS)

    def generate(self, request: GenerateRequest) -> AnswerStream:
        """Deltas of all answers to the request, queued at once; closing the stream aborts them.

        A request with a grammar is queued once that is compiled, on another thread; RequestError
        is raised while iterating if it cannot. All else is raised here: RequestError if it cannot
        be served, OverloadedError if the queue is full, EngineDeadError if the engine has stopped.
        """
        self._admit(request)
        stream = AnswerStream(request.rid, request.sampling.n, self._abandon)
        self._streams[request.rid] = stream
        spec = request.sampling.grammar
        if spec is None:
            self._submit_request(request, stream)
        else:
            compiled = self._compilers.submit(self._engine.grammars.compile, spec)
            compiled.add_done_callback(partial(self._submit_request, request, stream))
        return stream

    def _submit_request(
        self,
        request: GenerateRequest,
        stream: AnswerStream,
        grammar: Future[LLMatcher] | None = None,
    ) -> None:
        added = self._submit(partial(self._add, request, stream, grammar))
        added.add_done_callback(partial(_fail_if_not, stream))

    def abort(self, rid: str) -> None:
        """End a request; its answers finish with "abort". Unknown ids are ignored."""
        if (stream := self._streams.get(rid)) is not None:
            stream.aborted = True
        self._submit(partial(self._abort, rid))

    async def close_session(self, session: str, cache_salt: str | None) -> int:
        """Forget what a session computed behind moved text; returns how many tokens."""
        return await self.run_on_engine_thread(
            lambda engine: engine.close_session(session, cache_salt)
        )

    async def flush_cache(self, timeout: float = 0.0) -> None:
        """Forget all cached KV once nothing runs; RequestError if that takes beyond `timeout`."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                return await asyncio.wrap_future(self._submit(self._flush))
            except RequestError:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_POLL_SECONDS)

    async def run_on_engine_thread(self, at: Callable[[Engine], _T]) -> _T:
        """The result of `at`, called between two steps. It must be quick and change nothing."""
        return await asyncio.wrap_future(self._submit(partial(at, self._engine)))

    def _admit(self, request: GenerateRequest) -> None:
        """Check on the caller's thread what does not need to wait for a step's end."""
        if self._thread.is_alive() and not self._accepting:
            raise RequestError("the server is shutting down", status=503)
        if not self.alive:
            raise EngineDeadError("the engine is not running")
        self._engine.limits.check(request)
        known = self._streams.get(request.rid)
        if known is not None and not known.finished:
            raise RequestError(f"a request with rid {request.rid!r} is running", param="rid")
        with self._lock:
            self._engine.check_queue(self._queued)
            self._queued += 1

    def _unfinished(self) -> list[AnswerStream]:
        return [stream for stream in self._streams.values() if not stream.finished]

    def _abandon(self, rid: str) -> None:
        """Abort a request whose stream was closed or forgotten.

        The garbage collector calls this too, on any thread, so it takes no lock. The engine is
        awake while there is something to abort.
        """
        self._streams.pop(rid, None)
        self._inbox.append((partial(self._abort_unread, rid), Future()))

    def _submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Run `call` on the engine's thread, between two steps."""
        future: Future[_T] = Future()
        with self._lock:
            if self._open:
                self._inbox.append((call, future))
            else:
                future.set_exception(EngineDeadError("the engine has stopped"))
        self._wake.set()
        return future

    # On the engine's thread.

    def _work(self) -> None:
        try:
            while not self._stopping or self._inbox:
                self._run_tasks()
                busy = self._engine.has_work
                deltas = self._engine.step() if busy else []
                busy = busy or self._engine.heal(self._is_wanted)
                self._take_snapshot()
                self._hand_out(deltas)
                if not (busy or self._stopping):
                    self._wake.wait()
                    self._wake.clear()
        except Exception:
            logger.critical("the engine's thread failed", exc_info=True)
        finally:
            self._shut()

    def _take_snapshot(self) -> None:
        try:
            self._snapshot = self._engine.snapshot()
        except Exception:  # stale gauges are better than no answers
            if not self._blind:
                logger.error("the engine's gauges could not be read", exc_info=True)
            self._blind = True

    def _is_wanted(self) -> bool:
        return bool(self._inbox) or self._stopping

    def _add(
        self, request: GenerateRequest, stream: AnswerStream, grammar: Future[LLMatcher] | None
    ) -> None:
        with self._lock:
            self._queued -= 1
        compiled = None if grammar is None else grammar.result()
        if compiled is not None and stream.finished:  # closed meanwhile, which aborted nothing
            return
        self._engine.add(request, compiled)
        self._readers[request.rid] = stream
        if stream.aborted:  # meanwhile: nothing was there to abort
            self._abort(request.rid)
        self._take_snapshot()  # the next step may be long

    # The snapshot is taken before clients are told of a change.

    def _flush(self) -> None:
        self._engine.flush_cache()
        self._take_snapshot()

    def _abort(self, rid: str) -> None:
        deltas = self._engine.abort(rid)
        self._take_snapshot()
        self._hand_out(deltas)

    def _abort_unread(self, rid: str) -> None:
        self._readers.pop(rid, None)
        self._engine.abort(rid)
        self._take_snapshot()

    def _run_tasks(self) -> None:
        while self._inbox:
            call, future = self._inbox.popleft()
            if not future.set_running_or_notify_cancel():
                continue  # its caller was cancelled
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

    def _hand_out(self, deltas: Iterable[OutputDelta]) -> None:
        """Send deltas to their streams with one call per event loop."""
        by_loop: dict[AbstractEventLoop, list[tuple[AnswerStream, OutputDelta]]] = {}
        for delta in deltas:
            stream = self._readers.get(delta.rid)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append((stream, delta))
        for loop, items in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_deliver, items)

    def _shut(self) -> None:
        """Fail all pending tasks and streams, then close the engine."""
        self._engine.dead = True
        with self._lock:
            self._open = False
        gone = EngineDeadError("the engine has stopped")
        self._compilers.shutdown(wait=False, cancel_futures=True)
        for _, future in self._inbox:
            if future.set_running_or_notify_cancel():
                future.set_exception(gone)
        for stream in list(self._streams.values()):
            with suppress(RuntimeError):
                stream.loop.call_soon_threadsafe(stream.fail, gone)
        try:
            self._engine.close()
        except Exception:
            logger.error("the engine could not be closed properly", exc_info=True)


def _deliver(items: Iterable[tuple[AnswerStream, OutputDelta]]) -> None:
    for stream, delta in items:
        stream.deliver(delta)


def _fail_if_not(stream: AnswerStream, added: Future[None]) -> None:
    error = added.exception()
    if isinstance(error, Exception):
        with suppress(RuntimeError):
            stream.loop.call_soon_threadsafe(stream.fail, error)
