"""Steps use the cores that nobody else uses, and one thread where that is quicker."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvweave.engine.execution import threads
from kvweave.engine.execution.threads import StepThreads


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four cores, all of them ours; torch's threads as they were afterwards."""
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    monkeypatch.setattr(threads, "WAITS_BRIEFLY", True)
    yield
    torch.set_num_threads(before)


def chosen(step: StepThreads, tokens: int = 500, seconds: float = 0.01) -> int:
    """Of a step 60 ms after the last look, one right after the last."""
    step._looked -= 0.06
    step.begin(tokens)
    step.took(seconds)
    return torch.get_num_threads()


@pytest.mark.parametrize(
    ("running", "most", "expected"),
    [(1, 4, 4), (2, 4, 3), (4, 4, 1), (9, 4, 1), (2, 2, 2), (0, 4, 4), (None, 4, 4), (9, 1, 1)],
)
def test_cores_of_others_are_left_to_them(running, most, expected):
    assert chosen(StepThreads(most, lambda: running)) == expected


@pytest.mark.parametrize(("running", "expected"), [(3, 4), (4, 3), (1, 4)])
def test_threads_that_leave_their_cores_count_for_nothing(running, expected):
    assert chosen(StepThreads(4, lambda: running, lambda: 2)) == expected


def test_what_runs_for_a_moment_costs_no_thread_and_what_stays_does():
    now = [1]
    step = StepThreads(4, lambda: now[0])
    assert chosen(step) == 4
    now[0] = 2
    assert chosen(step) == 4
    assert [chosen(step) for _ in range(4)][-1] == 3
    now[0] = 1
    assert chosen(step) == 4
    moments = iter([4, 1])
    step._running = lambda: next(moments)
    step._ended -= 1
    assert chosen(step) == 4


def test_a_share_of_the_machine_is_a_share_of_its_load(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert chosen(StepThreads(4, lambda: 9)) == 2


def test_while_threads_spin_nothing_can_be_seen(monkeypatch):
    """They would count as others'."""
    monkeypatch.setattr(threads, "WAITS_BRIEFLY", False)
    now = [1]
    step = StepThreads(4, lambda: now[0])
    assert chosen(step) == 4
    now[0] = 4
    assert chosen(step) == 4
    step._ended -= 1
    step._spun -= 1
    assert chosen(step) == 1
    now[0] = 1
    step._spun -= 1
    assert chosen(step) == 4  # asleep while one was enough


@pytest.mark.parametrize(("one", "all_", "expected"), [(1.0, 2.0, 1), (2.0, 1.0, 4)])
def test_small_steps_run_on_what_was_measured_to_be_quicker(one, all_, expected):
    step = StepThreads(4, lambda: 1)
    used = []
    for _ in range(400):
        step.begin(3)
        used.append(torch.get_num_threads())
        step.took(one if used[-1] == 1 else all_)
    assert set(used[-200:]) == {expected}
    assert used.count(1 if expected == 4 else 4) <= 100
    step.begin(500)
    assert torch.get_num_threads() == 4  # large ones are not asked


def test_engines_with_numbers_of_their_own_share_a_thread():
    four, two = StepThreads(4, lambda: 1), StepThreads(2, lambda: 1)
    assert [chosen(four), chosen(two), chosen(four)] == [4, 2, 4]


@pytest.mark.skipif(not Path("/proc/loadavg").exists(), reason="only Linux says what runs")
def test_linux_counts_what_runs():
    assert threads._running_here() >= 1
    assert threads._running_here(Path("/proc/nothing")) is None
    assert threads._running_here(Path("/proc/version")) is None


def test_torch_is_set_in_the_thread_that_computes():
    seen = []

    def compute() -> None:
        StepThreads(3, lambda: 1).begin(500)
        seen.append(torch.get_num_threads())

    worker = threading.Thread(target=compute)
    worker.start()
    worker.join()
    assert seen == [3]
