"""Tokens and times of one prompt's answers, for `usage`, /metrics, the log and the explorer."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any, Literal, Protocol

from kvweave.engine.types import GenerateRequest, OutputDelta, Usage
from kvweave.errors import RequestError, reason
from kvweave.prefix.plan import Reuse, Span
from kvweave.server.logs import LogFields
from kvweave.server.metrics import Metrics

log = logging.getLogger("kvweave.server.requests")


class RequestObserver(Protocol):
    """Receives the metrics of every prompt once, when it has ended."""

    def add(self, metrics: RequestMetrics) -> None: ...


class RequestMetrics:
    """Follows the deltas of one prompt; `close` counts and logs it, however it ended."""

    def __init__(
        self,
        request: GenerateRequest,
        metrics: Metrics,
        *,
        endpoint: str,
        logged: bool = False,
        observer: RequestObserver | None = None,
    ) -> None:
        self.request = request
        self.rid = request.rid
        self.usage = Usage(prompt_tokens=len(request.prompt_ids))
        self.completion_tokens = 0
        self._failed: Literal["refused", "error"] | None = None
        self._reason = ""
        self.endpoint = endpoint
        self.arrived = time.time()
        self.plan: tuple[Span, ...] = ()
        self.refreshed: tuple[tuple[int, int], ...] = ()
        self.answer: list[int] = []
        """Tokens of the first answer so far."""
        self._answers = request.sampling.n
        self._observer = observer
        self._metrics = metrics
        self._logged = logged
        self._started = time.perf_counter()
        self._served = False
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._finished: dict[int, str] = {}
        self._ended: float | None = None

    def note(self, delta: OutputDelta) -> None:
        """Add one delta, as it arrives; one that comes after `close` counts nowhere."""
        if self._ended is not None:
            return
        now = time.perf_counter()
        self.usage = delta.usage  # of the prompt, which all its answers share
        if delta.plan:
            self.plan, self.refreshed = delta.plan, delta.refreshed
        if delta.index == 0:
            self.answer += delta.token_ids
        tokens = len(delta.token_ids)
        if tokens:
            if self._first is None:
                self._first = now
                self._metrics.first_token.observe(now - self._started)
            last = self._last.get(delta.index)
            self._metrics.generated(tokens, None if last is None else now - last)
            self._last[delta.index] = now
            self.completion_tokens += tokens
        if not self._served and (tokens or delta.finish_reason in ("stop", "length")):
            self._served = True
            self._metrics.prompt_served(self.usage)
        if delta.finish_reason is not None:
            self._finished[delta.index] = delta.finish_reason

    @property
    def first_token_seconds(self) -> float | None:
        """From arrival; None before there is one."""
        return None if self._first is None else self._first - self._started

    @property
    def total_seconds(self) -> float:
        """From arrival to the end, or to now."""
        return (self._ended or time.perf_counter()) - self._started

    @property
    def outcome(self) -> str:
        """How it ended: stop, length, abort (also if the client left), refused or error."""
        if self._failed is not None:
            return self._failed
        if len(self._finished) < self._answers or "abort" in self._finished.values():
            return "abort"
        return "length" if "length" in self._finished.values() else "stop"

    def fail(self, failure: Exception) -> None:
        """Note a failure; the exception is not kept, since its traceback holds the generation."""
        refused = isinstance(failure, RequestError) and failure.status < 500
        self._failed = "refused" if refused else "error"
        self._reason = reason(failure)

    def close(self) -> None:
        """Count and log it; twice is harmless."""
        if self._ended is not None:
            return
        self._ended = time.perf_counter()
        generated = self.completion_tokens if self._served else None
        self._metrics.request_ended(self.outcome, generated, self.total_seconds)
        if self._observer is not None:
            self._observer.add(self)
        if self._logged:
            log.info(
                LogFields(
                    "request ended",
                    rid=self.rid,
                    endpoint=self.endpoint,
                    outcome=self.outcome,
                    prompt_tokens=self.usage.prompt_tokens,
                    **reuse_fields(self.usage.reuse),
                    completion_tokens=self.completion_tokens,
                    first_token_ms=_milliseconds(self.first_token_seconds),
                    total_ms=_milliseconds(self.total_seconds),
                    **({} if self._failed is None else {"reason": self._reason}),
                )
            )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)


def usage_body(metrics: Iterable[RequestMetrics]) -> dict[str, Any]:
    """OpenAI's usage object over all prompts of a request, with the sources of their KV."""
    prompt = completion = written = 0
    reuse = Reuse()
    for each in metrics:
        prompt += each.usage.prompt_tokens
        completion += each.completion_tokens
        reuse += each.usage.reuse
        written += each.usage.cache_write_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {**reuse_fields(reuse), "cache_write_tokens": written},
    }


def reuse_fields(reuse: Reuse) -> dict[str, int]:
    """As responses and log lines name it."""
    return {
        "cached_tokens": reuse.exact,
        "moved_tokens": reuse.moved,
        "paraphrase_tokens": reuse.paraphrase,
        "refreshed_tokens": reuse.recomputed,
        "session_tokens": reuse.session,
    }
