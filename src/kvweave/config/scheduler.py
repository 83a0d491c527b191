"""Settings of the scheduler: how many requests run and wait, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from kvweave.config.base import flag, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of running and waiting requests, and their order."""

    max_running_requests: int = flag(64, "Requests that run together.")
    max_queued_requests: int = flag(1024, "Requests that may wait; more are answered 429.")
    chunked_prefill_size: int = flag(
        2048, "Tokens computed in one step, prompts and outputs together."
    )
    schedule_policy: str = flag(
        "fcfs",
        "Order of waiting requests: first come, or longest cached prefix.",
        choices=("fcfs", "lpm"),
    )
    random_seed: int | None = flag(None, "Seed for requests that bring none.")

    def problems(self) -> list[str]:
        return positive(self, "max_running_requests", "max_queued_requests", "chunked_prefill_size")
