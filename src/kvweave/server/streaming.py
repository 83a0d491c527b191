"""Runs generations and sends their responses, plain or as server-sent events.

Both kinds watch the connection. When the client disconnects, in the queue, in prefill or between
two tokens, the generation is closed, which aborts it in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvweave.engine.types import EngineSnapshot, GenerateRequest, OutputDelta
from kvweave.errors import KvweaveError, RequestError
from kvweave.server.errors import AnswerFailedError
from kvweave.server.metrics import RequestMetrics

if TYPE_CHECKING:
    from kvweave.engine.engine import Engine

log = logging.getLogger("kvweave.server")
T = TypeVar("T")


class ServingEngine(Protocol):
    """The part of an engine that a server uses; `engine.AsyncEngine` is one."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[OutputDelta]:
        """Deltas of all answers to one prompt; closing the iterator aborts the unfinished ones."""
        ...

    def abort(self, rid: str) -> None:
        """End a request; its answers finish with "abort". Unknown ids are ignored."""
        ...

    @property
    def alive(self) -> bool:
        """False once the engine has stopped for good."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        ...

    async def start(self) -> None:
        """Start the engine's thread."""
        ...

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Finish running requests for up to `drain_seconds`, then abort the rest."""
        ...

    async def flush_cache(self, timeout: float = 0.0) -> None:
        """Drop all cached KV once no request runs; RequestError after `timeout` seconds."""
        ...

    async def close_session(self, session: str, cache_salt: str | None) -> int:
        """Forget what a session computed behind moved text; returns how many tokens."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Gauges and counters, as of now."""
        ...

    async def run_on_engine_thread(self, at: Callable[[Engine], T]) -> T:
        """The result of `at`, called between two steps; it must be quick and change nothing."""
        ...


Batch = list[tuple[int, OutputDelta]]
"""Deltas since the last batch: (index of the prompt, delta), one per answer."""


class LiveGenerations:
    """Running generations by the rid that the client knows."""

    def __init__(self) -> None:
        self._by_rid: dict[str, Generation] = {}

    def __len__(self) -> int:
        return len(self._by_rid)

    def metrics(self) -> Iterator[RequestMetrics]:
        """Of every prompt that is being answered, in order of arrival."""
        for generation in self._by_rid.values():
            yield from generation.metrics

    def enter(self, rid: str, generation: Generation) -> None:
        """RequestError if `rid` is taken."""
        if rid in self._by_rid:
            raise RequestError(f"a request with rid {rid} is running already", param="rid")
        self._by_rid[rid] = generation

    def leave(self, rid: str) -> None:
        del self._by_rid[rid]

    def abort(self, rid: str | None = None) -> int:
        """End one request, or all of them; returns how many there were."""
        found = self._by_rid.values() if rid is None else filter(None, [self._by_rid.get(rid)])
        return sum(generation.abort() for generation in list(found))


class Generation:
    """Runs `requests` together; iterate over it for batches, inside `async with`.

    A reader that is slower than the engine gets fewer, longer deltas: waiting deltas of an answer
    are joined. The first failure of any prompt ends all of them and is raised here, after the
    deltas that arrived before it.
    """

    def __init__(
        self,
        rid: str,
        requests: Sequence[GenerateRequest],
        metrics: Sequence[RequestMetrics],
        *,
        source: ServingEngine,
        live: LiveGenerations,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`names`: what fields of the engine's request are called in the body, for refusals."""
        self.rid = rid
        self.requests = tuple(requests)
        self.metrics = tuple(metrics)
        self._source = source
        self._live = live
        self._names = names
        self._tasks: list[asyncio.Task[None]] = []
        self._arrived: dict[tuple[int, int], OutputDelta] = {}
        self._news = asyncio.Event()
        self._failure: Exception | None = None

    def abort(self) -> int:
        """End every answer where it is; returns 1, for counting."""
        for request in self.requests:
            self._source.abort(request.rid)
        return 1

    async def __aenter__(self) -> Generation:
        self._live.enter(self.rid, self)
        self._tasks = [
            asyncio.create_task(self._pump(place)) for place in range(len(self.requests))
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:  # also if a disconnect cancels the waiting
            # A failure's traceback refers to this object. Kept, the cycle would hold all deltas
            # and the engine's stream until the garbage collector runs.
            self._failure = None
            self._tasks.clear()
            self._live.leave(self.rid)
            for metrics in self.metrics:
                metrics.close()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Batch:
        while not self._arrived:
            if self._failure is not None:
                raise self._failure
            if all(task.done() for task in self._tasks):
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        batch = [(place, delta) for (place, _), delta in self._arrived.items()]
        self._arrived.clear()
        return batch

    async def _pump(self, place: int) -> None:
        try:
            stream = self._source.generate(self.requests[place])
            async with contextlib.aclosing(stream) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    self.metrics[place].note(delta)
                    if delta.finish_reason == "error":
                        raise AnswerFailedError(delta.error or "the engine gave no reason")
                    self._add(place, delta)
        except Exception as failure:
            self.metrics[place].fail(failure)
            if isinstance(failure, RequestError):
                failure.param = self._names.get(failure.param or "", failure.param)
            self._failure = self._failure or failure
        finally:
            # The reader must see this task as done: wake it after this task has ended.
            asyncio.get_running_loop().call_soon(self._news.set)

    def _add(self, place: int, delta: OutputDelta) -> None:
        waiting = self._arrived.get((place, delta.index))
        self._arrived[place, delta.index] = _joined(waiting, delta) if waiting else delta
        self._news.set()


def _joined(first: OutputDelta, then: OutputDelta) -> OutputDelta:
    """Two successive deltas of one answer as one."""
    return replace(
        then,
        text=first.text + then.text,
        token_ids=first.token_ids + then.token_ids,
        logprobs=first.logprobs + then.logprobs,
        prompt_logprobs=first.prompt_logprobs or then.prompt_logprobs,
        plan=first.plan or then.plan,
        refreshed=first.refreshed or then.refreshed,
    )


class Writer(Protocol):
    """Writes a generation as one object or as a series of events."""

    named_events: bool
    """Each event is named by its `type`, as Responses and Messages have it; else [DONE] ends them.
    """

    def add(self, batch: Batch) -> Iterable[dict[str, Any]]:
        """The events for a batch; none while a plain answer is collected."""
        ...

    def end(self) -> Any:
        """After all answers: the plain answer, or a stream's last event (None: there is none)."""
        ...

    def failed(self, failure: Exception) -> dict[str, Any]:
        """The event that ends a stream which failed after it had begun."""
        ...


class ClientGoneError(Exception):
    """The client has disconnected."""


class GenerationResponse(Response):
    """Runs a generation while the client is connected, and sends the output of `writer`.

    Nothing is sent before the first token, so a failure until then has its own HTTP status. A later
    failure ends a stream with an event that carries the error. The rid is free again by the end of
    the response.
    """

    def __init__(self, generation: Generation, writer: Writer, *, stream: bool) -> None:
        super().__init__()
        self._generation = generation
        self._writer = writer
        self._streamed = stream
        self._rid = generation.rid

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream if self._streamed else self._plain
        try:
            await while_connected(receive, work(scope, receive, send))
        except ClientGoneError:
            log.debug("rid=%s the client went away", self._rid)

    async def _plain(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation:
            async for batch in self._generation:
                self._writer.add(batch)
        headers = {"x-request-id": self._rid}
        await JSONResponse(self._writer.end(), headers=headers)(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with self._generation:
                async for batch in self._generation:
                    events = b"".join(map(self._event, self._writer.add(batch)))
                    if not started:
                        await self._start(send)
                        started = True
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            last = self._writer.end()
            tail = self._event(last) if last is not None else b""
        except Exception as failure:
            if not started:
                raise
            unexpected = not isinstance(failure, KvweaveError)
            # Log the text, not the exception: a kept log record must not keep the request alive.
            words = str(failure)
            log.warning("rid=%s failed in mid-stream: %s", self._rid, words, exc_info=unexpected)
            tail = self._event(self._writer.failed(failure))
        if not started:
            await self._start(send)
        if not self._writer.named_events:
            tail += b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    def _event(self, body: dict[str, Any]) -> bytes:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        name = f"event: {body['type']}\n" if self._writer.named_events else ""
        return f"{name}data: {text}\n\n".encode()

    async def _start(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # proxies must not buffer
            (b"x-request-id", self._rid.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`; if the client disconnects first, cancel it and raise ClientGoneError.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
