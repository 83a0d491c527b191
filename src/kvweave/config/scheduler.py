"""Settings of the scheduler: how much runs at once, and drafts of later tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Whether decoding proposes tokens from text that is there, and how many at most."""

    PREFIX: ClassVar[str] = "speculative_"

    algorithm: str = flag(
        "none",
        "Propose the next tokens from the prompt, the answer and cached text, and verify them in "
        "one forward pass: NGRAM, or none.",
        choices=("none", "NGRAM"),
    )
    num_draft_tokens: int = flag(12, "Most tokens that are proposed for one answer in one step.")
    ngram_min_match_window_size: int = flag(
        2, "Tokens at the end of an answer that must stand elsewhere too before any is proposed."
    )

    def problems(self) -> list[str]:
        return positive(self, "num_draft_tokens", "ngram_min_match_window_size")
