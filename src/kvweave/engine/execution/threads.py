"""Chooses the number of CPU threads of a step: the cores that no other process uses now.

A step consists of hundreds of parallel regions, each of which ends when its last thread does. If
one of the threads has to share its core with another process, every region may wait for a time
slice of the scheduler's: milliseconds instead of microseconds. One thread fewer is then far faster.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

WAITS_BRIEFLY = os.environ.get("OMP_WAIT_POLICY", "").strip().lower() == "passive"
"""Idle threads sleep at once. By default GNU's runtime lets them spin for milliseconds: they take a
core from threads that have work, and look busy themselves."""
_ALL = torch.get_num_threads()
"""What torch uses by itself: the cores, or what the environment says."""
_SETTLED = 0.05
"""Seconds after a step on several threads in which idle ones may still be spinning."""
_MOMENT = 0.0005
"""Seconds between two looks at what runs."""
_SMALL = 64
"""Tokens of a step that may be quicker on one thread than on all."""
_TRIALS, _TRIAL_EVERY, _TRIAL_LATER = 3, 32, 512
"""Steps that try the other number of threads: so many at first, then one in _TRIAL_EVERY, later one
in _TRIAL_LATER."""


class StepThreads:
    """Chooses before each step; belongs to the engine's thread, whose torch it sets.

    `most` None: as many as torch would use. `running` counts the threads that run or want to, this
    one included; None if it is not known. `yielding` counts those of them that leave a core at once
    to whoever wants it.
    """

    def __init__(
        self,
        most: int | None = None,
        running: Callable[[], int | None] | None = None,
        yielding: Callable[[], int] = lambda: 0,
    ) -> None:
        self.most = _ALL if most is None else most
        self._running = _running_here if running is None else running
        self._yielding = yielding
        self._cores = os.cpu_count() or 1
        self._own_cores = usable_cores()
        self._others = 0.0
        self._free = self.most
        self._looked = self._ended = self._spun = -math.inf
        self._trials: dict[int, _Trial] = {}
        self._trial: _Trial | None = None
        self._chosen = 0

    def begin(self, tokens: int) -> None:
        """A step of so many tokens begins."""
        if self.most > 1 and self._may_look():
            self._look()
        chosen = min(self.most, self._free)
        self._trial = None
        if chosen == self.most > 1 and tokens <= _SMALL:
            self._trial = self._trials.setdefault(tokens.bit_length(), _Trial(chosen))
            chosen = self._trial.choose()
        self._chosen = chosen
        if chosen != torch.get_num_threads():  # other engines may have set it on this thread
            torch.set_num_threads(chosen)

    def took(self, seconds: float) -> None:
        """The step is over."""
        self._ended = time.monotonic()
        if self._chosen > 1:
            self._spun = self._ended
        if self._trial is not None:
            self._trial.took(self._chosen, seconds)

    def _may_look(self) -> bool:
        """Now and then, and not while an idle thread of this process may still look busy."""
        now = time.monotonic()
        return now - self._looked > _SETTLED and (WAITS_BRIEFLY or now - self._spun > _SETTLED)

    def _look(self) -> None:
        """Find how many cores are free: all that this process may use, without its share of what
        others use."""
        others = self._others_now()
        if others:
            time.sleep(_MOMENT)  # the event loop, say, which has sent the last step's tokens
            others = min(others, self._others_now())
        now = time.monotonic()
        paused = now - max(self._ended, self._looked) > _SETTLED
        self._looked = now
        self._others = others if paused else self._others + 0.5 * (others - self._others)
        busy = min(others, math.ceil(self._others - 0.5))
        self._free = max(1, self._own_cores - math.ceil(busy * self._own_cores / self._cores))

    def _others_now(self) -> int:
        running = self._running()
        return 0 if running is None else max(0, running - 1 - self._yielding())


class _Trial:
    """Steps of about one size on one thread and on all: which is quicker, tried now and then."""

    def __init__(self, most: int) -> None:
        self._seconds: dict[int, list[float]] = {1: [], most: []}
        self._best = self._most = most
        self._steps = 0

    def choose(self) -> int:
        self._steps += 1
        known = min(len(each) for each in self._seconds.values()) >= _TRIALS
        every = _TRIAL_LATER if known else _TRIAL_EVERY
        return self._best if self._steps % every else 1 + self._most - self._best

    def took(self, threads: int, seconds: float) -> None:
        latest = self._seconds.get(threads)
        if latest is None:
            return
        latest.append(seconds)
        del latest[: -2 * _TRIALS]
        one, all_ = self._seconds[1], self._seconds[self._most]
        if min(len(one), len(all_)) >= _TRIALS:
            self._best = 1 if median(one) < median(all_) else self._most


def usable_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def _running_here(file: Path = Path("/proc/loadavg")) -> int | None:
    """Threads of the whole machine that run or want to; None where Linux does not say."""
    try:
        return int(file.read_bytes().split()[3].split(b"/")[0])
    except (OSError, IndexError, ValueError):
        return None
