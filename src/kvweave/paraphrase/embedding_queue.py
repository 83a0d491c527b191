"""Schedules embedding: requests that block a prompt first, background tasks when the engine idles.

Everything that is remembered belongs to a namespace. A text that one tenant sent is unknown to
another, in what is served and in how long it takes.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

import numpy as np

from kvweave.fuzzy.guard import contained
from kvweave.paraphrase.embedders import Embedder, Vectors
from kvweave.prefix.lease import Namespace

_log = logging.getLogger(__name__)

Texts: TypeAlias = Callable[[], "Sequence[str]"]
Delivery: TypeAlias = Callable[[Vectors], None]

_QUIET = 1.0
"""Seconds without activity of the engine after which it counts as idle."""
_PATIENCE, _BUSY_SHARE = 30.0, 0.05
"""Tasks that waited so long get this share of the time although the engine is busy."""
_MOST_TASKS = 4096
_MOST_URGENT = 256
"""Texts that were too late for their own prompts and are embedded for the next ones."""
_BATCH = 16
_REMEMBERED = 2048
_MOST_FAILURES = 3


class _Text(NamedTuple):
    """A text of one tenant."""

    namespace: Namespace
    text: str


class _Task(NamedTuple):
    queued: float
    namespace: Namespace
    texts: Texts
    deliver: Delivery


class EmbeddingQueue:
    """One thread in front of one embedder.

    Urgent texts come first. Vectors are remembered by namespace and text: a text that is too late
    for one prompt is ready for the next, and repeated text is embedded once. Background tasks wait
    until the engine is idle, which it is not while a request runs. When either list is full, its
    oldest entry is dropped. An embedder that fails several times in a row is not asked again.
    """

    def __init__(
        self,
        embedder: Embedder,
        quiet: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        running: Callable[[], bool] = lambda: False,
    ) -> None:
        """`running` tells whether the engine runs a request now."""
        self._embedder = embedder
        self._quiet = _QUIET if quiet is None else quiet
        self._clock = clock
        self._running = running
        self._urgent: deque[tuple[_Text, Future[Vectors]]] = deque()
        self._tasks: deque[_Task] = deque()
        self._known: OrderedDict[_Text, Vectors] = OrderedDict()
        self._coming: dict[_Text, Future[Vectors]] = {}
        self._changed = threading.Condition()
        self._working = False
        self._over = threading.Event()
        self._seen = clock()
        self._rest_until = 0.0
        self._failures = 0
        self.counts = dict.fromkeys(("embedded", "dropped", "failed"), 0)
        """Texts embedded; tasks and late texts dropped for lack of room; failed calls of the
        embedder."""
        thread = threading.Thread(target=_work, args=(weakref.ref(self),), name="kvweave-embedder")
        thread.daemon = True
        weakref.finalize(self, _stop, self._changed, self._over)
        thread.start()

    @property
    def dead(self) -> bool:
        """The embedder failed too often: nothing is embedded any more."""
        return self._failures >= _MOST_FAILURES

    def busy(self) -> None:
        """The engine is active now."""
        self._seen = self._clock()

    def vectors(
        self, namespace: Namespace, texts: Sequence[str], seconds: float
    ) -> list[Vectors | None]:
        """The texts' vectors (dimension), None for those that are not ready within `seconds`."""
        deadline = time.monotonic() + seconds
        waited = [self._request(_Text(namespace, text)) for text in texts]
        return [_within(future, deadline) for future in waited]

    def later(self, namespace: Namespace, texts: Texts, deliver: Delivery) -> None:
        """Embed what `texts` returns when there is time, and call `deliver` with the vectors.

        Both run on the queue's own thread.
        """
        with self._changed:
            if self.dead:
                return
            if len(self._tasks) >= _MOST_TASKS:
                self._tasks.popleft()
                self.counts["dropped"] += 1
            self._tasks.append(_Task(self._clock(), namespace, texts, deliver))
            self._changed.notify_all()

    def settle(self, seconds: float) -> bool:
        """Wait until nothing is left to do; False if something still is after `seconds`."""
        with self._changed:
            return self._changed.wait_for(self._done, seconds)

    def close(self) -> None:
        """Stop. Callers that wait get None."""
        _stop(self._changed, self._over)

    def _done(self) -> bool:
        return self.dead or not (self._urgent or self._tasks or self._working)

    def _request(self, text: _Text) -> Future[Vectors]:
        with self._changed:
            future = self._coming.get(text)
            if future is not None:
                return future
            future = Future()
            known = self._known.get(text)
            if known is not None:
                self._known.move_to_end(text)
                future.set_result(known)
            elif self.dead or self._over.is_set():
                future.cancel()
            else:
                if len(self._urgent) >= _MOST_URGENT:
                    self._drop_oldest()
                self._coming[text] = future
                self._urgent.append((text, future))
                self._changed.notify_all()
            return future

    def _drop_oldest(self) -> None:
        text, future = self._urgent.popleft()
        del self._coming[text]
        future.cancel()
        self.counts["dropped"] += 1

    # On the queue's thread.

    def _turn(self) -> bool:
        """Do one thing, or wait a while for something to do; False after `close`."""
        with self._changed:
            if not (self._urgent or self._may_run_tasks()):
                self._changed.wait(self._quiet / 4 if self._tasks else self._quiet * 4)
            if self._over.is_set():
                return False
            urgent = self._take_urgent()
            task = None
            if not urgent and self._may_run_tasks():
                task = self._tasks.popleft()
            self._working = bool(urgent or task)
        try:
            if urgent:
                self._serve(urgent)
            elif task is not None:
                self._run(task)
        finally:
            with self._changed:
                self._working = False
                self._changed.notify_all()
        return True

    def _may_run_tasks(self) -> bool:
        return bool(self._tasks) and not self.dead and self._idle(self._tasks[0].queued)

    def _idle(self, queued: float) -> bool:
        """Whether a task that was queued at `queued` may run now."""
        now = self._clock()
        if self._running():
            self._seen = now
        if now - self._seen >= self._quiet:
            return True
        return now - queued >= _PATIENCE and now >= self._rest_until

    def _take_urgent(self) -> list[tuple[_Text, Future[Vectors]]]:
        return [self._urgent.popleft() for _ in range(min(_BATCH, len(self._urgent)))]

    def _serve(self, urgent: list[tuple[_Text, Future[Vectors]]]) -> None:
        found = self._encode([text.text for text, _ in urgent])
        with self._changed:
            for at, (text, future) in enumerate(urgent):
                del self._coming[text]
                if found is None:
                    future.cancel()
                    continue
                future.set_result(found[at])
                self._remember(text, found[at])

    def _remember(self, text: _Text, vector: Vectors) -> None:
        self._known[text] = vector
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _run(self, task: _Task) -> None:
        try:
            whole = []
            for each in contained(task.texts):
                text = _Text(task.namespace, each)
                vector = self._known.get(text)
                if vector is None:
                    # One by one: a prompt that arrives meanwhile waits for a few milliseconds.
                    self._pause(task.queued)
                    began = self._clock()
                    found = self._encode([each])
                    self._rest_until = self._clock() + (self._clock() - began) / _BUSY_SHARE
                    if found is None:
                        return
                    vector = found[0]
                    with self._changed:
                        self._remember(text, vector)
                whole.append(vector)
            if whole:
                task.deliver(np.stack(whole))
        except Exception:
            _log.exception("texts to be embedded could not be prepared")

    def _pause(self, queued: float) -> None:
        """Wait until the engine is idle again; serves urgent texts meanwhile."""
        while True:
            with self._changed:
                urgent = self._take_urgent()
                if not urgent:
                    if self._over.is_set() or self._idle(queued):
                        return
                    self._changed.wait(self._quiet / 4)
            if urgent:
                self._serve(urgent)

    def _encode(self, texts: Sequence[str]) -> Vectors | None:
        if self.dead:
            return None
        try:
            found = contained(lambda: self._embedder.encode(texts))
            if len(found) != len(texts):
                raise ValueError(f"{len(found)} vectors for {len(texts)} texts")
        except Exception:
            if self._over.is_set():
                return None  # at exit the embedder may end first
            self.counts["failed"] += 1
            self._failures += 1
            if self.dead:
                self._tasks.clear()
            what = "and is not asked again" if self.dead else "this time"
            _log.warning("the embedder failed, %s", what, exc_info=True)
            return None
        self._failures = 0
        self.counts["embedded"] += len(texts)
        return found


def _work(reference: weakref.ref[EmbeddingQueue]) -> None:
    while (queue := reference()) is not None and queue._turn():
        del queue


def _stop(changed: threading.Condition, over: threading.Event) -> None:
    with changed:
        over.set()
        changed.notify_all()


def _within(future: Future[Vectors], deadline: float) -> Vectors | None:
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except Exception:  # late, cancelled
        return None
