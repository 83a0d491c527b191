"""Who is embedded when: what somebody waits for at once, everything else while nobody computes."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import numpy as np

from kvweave.paraphrase.embedders import Embedder, Vectors

_log = logging.getLogger(__name__)

Task: TypeAlias = Callable[[], "Sequence[str]"]
"""Run on the desk's thread, it says which texts to embed."""
Delivery: TypeAlias = Callable[[Vectors], None]

_QUIET = 1.0
"""Seconds without a sign of life from the engine after which it counts as idle."""
_PATIENCE, _BUSY_SHARE = 30.0, 0.05
"""Errands that waited so long get this share of the time although the engine is busy."""
_MOST_TASKS = 4096
_MOST_URGENT = 256
"""Texts that were too late for their own prompts, and wait to be there for the next."""
_BATCH = 16
_REMEMBERED = 2048
_MOST_FAILURES = 3


class EmbeddingQueue:
    """One thread in front of one embedder.

    `urgent` texts come first. Texts are remembered: whoever came too late for one prompt has them
    for the next, and what many prompts say is embedded once. Errands wait until the engine is idle,
    which it is not while a request runs. Of both, the oldest are dropped when there are too many.
    An embedder that fails several times in a row is not asked again.
    """

    def __init__(
        self,
        embedder: Embedder,
        quiet: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        running: Callable[[], bool] = lambda: False,
    ) -> None:
        """`running` tells whether the engine is at work, however long ago it showed it."""
        self._embedder = embedder
        self._quiet = _QUIET if quiet is None else quiet
        self._clock = clock
        self._running = running
        self._urgent: deque[tuple[str, Future[Vectors]]] = deque()
        self._tasks: deque[tuple[float, Task, Delivery]] = deque()
        self._known: OrderedDict[str, Vectors] = OrderedDict()
        self._coming: dict[str, Future[Vectors]] = {}
        self._changed = threading.Condition()
        self._working = False
        self._over = threading.Event()
        self._seen = clock()
        self._rest_until = 0.0
        self._failures = 0
        self.counts = dict.fromkeys(("embedded", "dropped", "failed"), 0)
        """Texts embedded, tasks and late texts dropped for lack of room, calls of the embedder
        that failed."""
        thread = threading.Thread(target=_work, args=(weakref.ref(self),), name="kvweave-embedder")
        thread.daemon = True
        weakref.finalize(self, _wind_up, self._changed, self._over)
        thread.start()

    @property
    def dead(self) -> bool:
        """The embedder failed too often: nothing will be embedded any more."""
        return self._failures >= _MOST_FAILURES

    def busy(self) -> None:
        """The engine shows a sign of life."""
        self._seen = self._clock()

    def vectors(self, texts: Sequence[str], seconds: float) -> list[Vectors | None]:
        """The texts' vectors (dimension), None for those that are not there within `seconds`."""
        deadline = time.monotonic() + seconds
        waited = [self._promise(text) for text in texts]
        return [_within(future, deadline) for future in waited]

    def later(self, task: Task, deliver: Delivery) -> None:
        """Embed what `task` says when there is time, and hand it to `deliver`; both on a thread
        of the desk's own."""
        with self._changed:
            if self.dead:
                return
            if len(self._tasks) >= _MOST_TASKS:
                self._tasks.popleft()
                self.counts["dropped"] += 1
            self._tasks.append((self._clock(), task, deliver))
            self._changed.notify_all()

    def settle(self, seconds: float) -> bool:
        """Wait until there is nothing to do; False if there still is after `seconds`."""
        with self._changed:
            return self._changed.wait_for(self._done, seconds)

    def close(self) -> None:
        """Stop; whoever waits gets nothing."""
        _wind_up(self._changed, self._over)

    def _done(self) -> bool:
        return self.dead or not (self._urgent or self._tasks or self._working)

    def _promise(self, text: str) -> Future[Vectors]:
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

    # On the desk's thread.

    def _turn(self) -> bool:
        """Do one thing, or wait a while for something to do; False when all is over."""
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
        return bool(self._tasks) and not self.dead and self._idle(self._tasks[0][0])

    def _idle(self, queued: float) -> bool:
        """Whether what was queued then may be done now."""
        now = self._clock()
        if self._running():
            self._seen = now
        if now - self._seen >= self._quiet:
            return True
        return now - queued >= _PATIENCE and now >= self._rest_until

    def _take_urgent(self) -> list[tuple[str, Future[Vectors]]]:
        return [self._urgent.popleft() for _ in range(min(_BATCH, len(self._urgent)))]

    def _serve(self, urgent: list[tuple[str, Future[Vectors]]]) -> None:
        found = self._encode([text for text, _ in urgent])
        with self._changed:
            for at, (text, future) in enumerate(urgent):
                del self._coming[text]
                if found is None:
                    future.cancel()
                    continue
                future.set_result(found[at])
                self._remember(text, found[at])

    def _remember(self, text: str, vector: Vectors) -> None:
        self._known[text] = vector
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _run(self, waiting: tuple[float, Task, Delivery]) -> None:
        queued, task, deliver = waiting
        try:
            texts = task()
            whole = []
            for text in texts:
                part = self._known.get(text)
                if part is None:
                    # One by one, so that a prompt which comes meanwhile meets a few milliseconds.
                    self._pause(queued)
                    began = self._clock()
                    found = self._encode([text])
                    self._rest_until = self._clock() + (self._clock() - began) / _BUSY_SHARE
                    if found is None:
                        return
                    part = found[0]
                    with self._changed:
                        self._remember(text, part)
                whole.append(part)
            if whole:
                deliver(np.stack(whole))
        except Exception:
            _log.exception("what was to be embedded could not be prepared")

    def _pause(self, queued: float) -> None:
        """Until the engine is idle again; who cannot wait is served meanwhile."""
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
            found = self._embedder.encode(texts)
            if len(found) != len(texts):
                raise ValueError(f"{len(found)} vectors for {len(texts)} texts")
        except Exception:
            if self._over.is_set():
                return None  # the embedder ends first, and that is no fault of its
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
    while (desk := reference()) is not None and desk._turn():
        del desk


def _wind_up(changed: threading.Condition, over: threading.Event) -> None:
    with changed:
        over.set()
        changed.notify_all()


def _within(future: Future[Vectors], deadline: float) -> Vectors | None:
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except Exception:  # late, cancelled
        return None
