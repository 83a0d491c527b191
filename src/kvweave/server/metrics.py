"""Metrics of the server for Prometheus, and of each request for `usage`, the log and the explorer.

Prometheus's have SGLang's names with the prefix `kvweave:`, so that dashboards fit. Figures of
requests are counted when a request reaches its first token or its end; the engine's gauges and
counters are read at every scrape. Prompt, cached and generated tokens are counted here, where the
histograms are: a histogram's sum is its counter's total, also after aborts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol, TypeAlias

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.engine.types import EngineSnapshot, GenerateRequest, OutputDelta, Usage
from kvweave.errors import RequestError, reason
from kvweave.prefix.lease import Reuse, Span, Tier
from kvweave.server.logs import LogFields

log = logging.getLogger("kvweave.server.requests")

PREFIX = "kvweave:"
_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2, 4, 8, 15, 30, 60, 120)
_TOKEN_GAP = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2, 5)
_WHOLE = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKENS = tuple(float(2**power) for power in range(3, 18))


class Metrics:
    """Everything that /metrics shows, in a registry of its own."""

    def __init__(self, model_name: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._model = model_name
        self._prompt_sum = self._cached_sum = 0
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
        )
        self._token_gaps = self._histogram(
            "inter_token_latency_seconds", "From one token of an answer to the next.", _TOKEN_GAP
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end of all answers.", _WHOLE
        )
        self._prompt_lengths = self._histogram(
            "prompt_tokens_histogram", "Tokens per prompt.", _TOKENS
        )
        self._answer_lengths = self._histogram(
            "generation_tokens_histogram", "Tokens generated per prompt.", _TOKENS
        )
        self._requests = self._counter(
            "num_requests", "Prompts accepted that have ended, however they ended."
        )
        self._aborted = self._counter(
            "num_aborted_requests", "Prompts that ended before their answer: client gone, aborted."
        )
        self._failed = self._counter(
            "num_failed_requests", "Prompts that ended with an error of the server."
        )
        self._refused = self._counter(
            "num_refused_requests", "HTTP requests refused, by status (4xx).", "status"
        )
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens, once per prompt, at its first token."
        )
        self._generated_tokens = self._counter("generation_tokens", "Tokens generated.")
        cached = self._counter(
            "cached_tokens",
            "Prompt tokens served from the cache, once per prompt, by tier.",
            "cache_source",
            "tier",
        )
        self._cached_tokens = {
            tier: cached.labels(model_name, "device", tier.value) for tier in Tier
        }
        self._shared_tokens = self._counter(
            "shared_tokens", "Of the moved prompt tokens, those read in the donor's pages."
        )
        self.registry.register(_EngineCollector(model_name, snapshot, self._hit_rate))

    def prompt_served(self, usage: Usage) -> None:
        """Count a prompt at its first token, or at its end if it was to get none."""
        cached = {
            Tier.EXACT: usage.cached_tokens,
            Tier.MOVED: usage.moved_tokens,
            Tier.PARAPHRASE: usage.paraphrase_tokens,
        }
        for tier, tokens in cached.items():
            self._cached_tokens[tier].inc(tokens)
        self._shared_tokens.inc(usage.reuse.shared)
        self._cached_sum += sum(cached.values())
        self._prompt_sum += usage.prompt_tokens
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._prompt_lengths.observe(usage.prompt_tokens)

    def generated(self, tokens: int, gap: float | None) -> None:
        """Count `tokens` tokens that came together, `gap` seconds after the last; None: first."""
        self._generated_tokens.inc(tokens)
        if gap is not None:
            for _ in range(tokens):
                self._token_gaps.observe(gap / tokens)

    def request_ended(self, outcome: str, generated: int | None, seconds: float) -> None:
        """Count a prompt whose answers have all ended; `generated` is None if it was not served."""
        if generated is not None:
            self._answer_lengths.observe(generated)  # also if a later prompt of it was refused
        if outcome == "refused":  # counted by RefusalCounter
            return
        self._requests.inc()
        if outcome == "abort":
            self._aborted.inc()
        elif outcome == "error":
            self._failed.inc()
        else:
            self._whole.observe(seconds)

    def request_refused(self, status: int) -> None:
        """Count an HTTP request that was answered with this status, 400 to 499."""
        self._refused.labels(self._model, status).inc()

    def _hit_rate(self) -> float:
        return self._cached_sum / self._prompt_sum if self._prompt_sum else 0.0

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return prometheus_client.generate_latest(self.registry)

    def _histogram(
        self, name: str, help: str, buckets: tuple[float, ...]
    ) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(
            PREFIX + name, help, ["model_name"], registry=self.registry, buckets=buckets
        ).labels(self._model)

    def _counter(self, name: str, help: str, *labels: str) -> prometheus_client.Counter:
        """A counter, which is still to be given its values if it has `labels` of its own."""
        counter = prometheus_client.Counter(
            PREFIX + name, help, ["model_name", *labels], registry=self.registry
        )
        return counter if labels else counter.labels(self._model)


class RefusalCounter:
    """Counts every HTTP request that `app` answers with a status from 400 to 499."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and 400 <= message["status"] < 500:
                self._metrics.request_refused(message["status"])
            await send(message)

        await self.app(scope, receive, counted)


_Family: TypeAlias = type[GaugeMetricFamily] | type[CounterMetricFamily]


class _EngineCollector(Collector):
    """The engine's gauges and counters, read at every scrape."""

    def __init__(
        self,
        model_name: str,
        snapshot: Callable[[], EngineSnapshot],
        hit_rate: Callable[[], float],
    ) -> None:
        self._model = model_name
        self._snapshot = snapshot
        self._hit_rate = hit_rate

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        usage = now.used_tokens / now.total_tokens if now.total_tokens else 0.0
        computed = {"token_usage": usage, "cache_hit_rate": self._hit_rate()}
        for kind, names in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (field, help) in names.items():
                family = kind(PREFIX + name, help, labels=["model_name"])
                family.add_metric(
                    [self._model], computed[name] if name in computed else getattr(now, field)
                )
                yield family
        for kind, name, label, field, help in _LABELLED:
            family = kind(PREFIX + name, help, labels=["model_name", label])
            for key, figure in sorted(getattr(now, field).items()):
                family.add_metric([self._model, key], figure)
            yield family


# By name: the field of EngineSnapshot, and the help text.
_GAUGES = {
    "num_running_reqs": ("running", "Answers that hold pages."),
    "num_queue_reqs": ("waiting", "Answers waiting to start, or to be resumed."),
    "max_total_num_tokens": ("total_tokens", "Slots of the KV pool."),
    "num_used_tokens": ("used_tokens", "Slots in use: not free, and not to be evicted."),
    "token_usage": ("", "Share of the pool in use."),
    "num_cached_tokens": ("cached_tokens", "Slots held by the prefix cache."),
    "num_evictable_tokens": ("evictable_tokens", "Cached slots that could be evicted now."),
    "num_heal_queue_prompts": (
        "heals_waiting",
        "Prompts served approximately that wait to be computed exactly.",
    ),
    "cache_hit_rate": ("", "Share of prompt tokens, since start, served from the cache."),
}
_COUNTERS = {
    "prefill_tokens": ("prefill_tokens", "Prompt tokens computed, also if aborted."),
    "evicted_tokens": ("evicted_tokens", "Slots evicted from the cache to make room."),
    "num_retracted_requests": ("preemptions", "Answers preempted, to be resumed."),
    "engine_steps": ("steps", "Forward passes for requests."),
    "spec_draft_tokens": ("drafted_tokens", "Tokens that drafts proposed."),
    "spec_accepted_tokens": ("accepted_tokens", "Tokens that drafts proposed and answers got."),
    "healed_prompts": ("healed", "Prompts computed exactly after approximate service."),
    "healed_tokens": ("healed_tokens", "Prompt tokens computed for healing, while idle."),
    "preempted_heals": ("heals_preempted", "Healing interrupted by a request."),
    "dropped_heals": (
        "heals_dropped",
        "Prompts never healed: too many waited, no room, or a fault.",
    ),
    "dropped_event_batches": ("dropped_event_batches", "Cache events not published."),
}
_LABELLED: tuple[tuple[_Family, str, str, str, str], ...] = (
    (
        *(CounterMetricFamily, "paraphrase_refused", "reason", "paraphrase_refused"),
        "Paraphrases that were proposed and not served, by reason.",
    ),
    (
        *(CounterMetricFamily, "fuzzy_provider_events", "event", "provider_events"),
        "Calls of the provider, by how they ended; its proposals, and those refused.",
    ),
    (
        *(GaugeMetricFamily, "fuzzy_provider_figures", "figure", "provider_figures"),
        "The provider's own gauges, as of the latest prompt, at most once a second.",
    ),
    (
        *(GaugeMetricFamily, "kv_store_figures", "figure", "store_figures"),
        "Counters and gauges of the KV that is kept on disk, in tokens, pages and bytes.",
    ),
)
"""Reuse beyond the prefix, and the store: a provider's own names are labels."""


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
                    first_token_ms=milliseconds(self.first_token_seconds),
                    total_ms=milliseconds(self.total_seconds),
                    **({} if self._failed is None else {"reason": self._reason}),
                )
            )


def milliseconds(seconds: float | None) -> float | None:
    """Rounded to tenths, for people."""
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
        "shared_tokens": reuse.shared,
    }
