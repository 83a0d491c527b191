"""Prometheus metrics, named as SGLang's are, with the prefix `kvweave:`, so that dashboards fit.

What happens to requests is observed as it happens; the engine's own gauges and counters are read
when someone asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from kvweave.engine.types import EngineSnapshot

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
        self._label = {"model_name": model_name}
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
        self._requests = self._counter("num_requests", "Prompts answered, however they ended.")
        self._aborted = self._counter(
            "num_aborted_requests", "Prompts that ended before their answer: client gone, aborted."
        )
        self._failed = self._counter("num_failed_requests", "Prompts that ended with an error.")
        self.registry.register(_EngineCollector(model_name, snapshot))

    def token_gap(self, seconds: float, tokens: int) -> None:
        """Observe `tokens` tokens that came together, `seconds` after the last."""
        for _ in range(tokens):
            self._token_gaps.observe(seconds / tokens)

    def request_ended(self, outcome: str, prompt: int, generated: int, seconds: float) -> None:
        """Count one prompt of `prompt` tokens whose answers have all ended."""
        self._requests.inc()
        if outcome == "abort":
            self._aborted.inc()
        elif outcome == "error":
            self._failed.inc()
        else:
            self._whole.observe(seconds)
            self._prompt_lengths.observe(prompt)
            self._answer_lengths.observe(generated)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return prometheus_client.generate_latest(self.registry)

    def _histogram(
        self, name: str, help: str, buckets: tuple[float, ...]
    ) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(
            PREFIX + name, help, list(self._label), registry=self.registry, buckets=buckets
        ).labels(**self._label)

    def _counter(self, name: str, help: str) -> prometheus_client.Counter:
        return prometheus_client.Counter(
            PREFIX + name, help, list(self._label), registry=self.registry
        ).labels(**self._label)


class _EngineCollector(Collector):
    """The engine's gauges and counters, read at every scrape."""

    def __init__(self, model_name: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._model = model_name
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        for name, (help, value) in _gauges(now).items():
            gauge = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (help, value) in _counters(now).items():
            counter = CounterMetricFamily(PREFIX + name, help, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        yield self._cached_tokens(now.hit_tokens)
        yield from self._beyond_the_prefix(now)

    def _cached_tokens(self, hits: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(
            PREFIX + "cached_tokens",
            "Prompt tokens served from the cache, once per request, by tier.",
            labels=["model_name", "cache_source", "tier"],
        )
        for tier in sorted({"exact", *hits}):
            family.add_metric([self._model, "device", tier], hits.get(tier, 0))
        return family

    def _beyond_the_prefix(self, now: EngineSnapshot) -> Iterator[Metric]:
        """What whoever finds reuse there counts. Names are its own: they are labels here."""
        for name, help, label, figures in (
            (
                "paraphrase_refused",
                "Other words for the same that were proposed and not served, by reason.",
                "reason",
                now.paraphrase_refused,
            ),
            (
                "fuzzy_provider_events",
                "Calls of the provider, by how they ended; its proposals, and those refused.",
                "event",
                now.provider_events,
            ),
        ):
            counter = CounterMetricFamily(PREFIX + name, help, labels=["model_name", label])
            for key, count in sorted(figures.items()):
                counter.add_metric([self._model, key], count)
            yield counter
        gauge = GaugeMetricFamily(
            PREFIX + "fuzzy_provider_figures",
            "What the provider tells of itself, as of a prompt a second ago or the last one.",
            labels=["model_name", "figure"],
        )
        for key, figure in sorted(now.provider_figures.items()):
            gauge.add_metric([self._model, key], figure)
        yield gauge


def _gauges(now: EngineSnapshot) -> dict[str, tuple[str, float]]:
    hits = sum(now.hit_tokens.values())
    return {
        "num_running_reqs": ("Answers that hold pages.", now.running),
        "num_queue_reqs": ("Answers waiting to start, or to be resumed.", now.waiting),
        "max_total_num_tokens": ("Slots of the KV pool.", now.total_tokens),
        "num_used_tokens": ("Slots in use: not free, and not to be evicted.", now.used_tokens),
        "token_usage": (
            "Share of the pool in use.",
            now.used_tokens / now.total_tokens if now.total_tokens else 0.0,
        ),
        "num_cached_tokens": ("Slots that the prefix cache keeps.", now.cached_tokens),
        "num_evictable_tokens": ("Slots that it could give back now.", now.evictable_tokens),
        "num_heal_queue_prompts": (
            "Prompts, served approximately, that wait to be computed exactly.",
            now.heals_waiting,
        ),
        "cache_hit_rate": (
            "Share of prompt tokens, since start, served and not computed.",
            hits / now.prompt_tokens if now.prompt_tokens else 0.0,
        ),
    }


def _counters(now: EngineSnapshot) -> dict[str, tuple[str, float]]:
    return {
        "prompt_tokens": ("Prompt tokens, once per admitted request.", now.prompt_tokens),
        "prefill_tokens": ("Prompt tokens that were computed.", now.prefill_tokens),
        "generation_tokens": ("Tokens generated.", now.generated_tokens),
        "evicted_tokens": ("Slots that the cache gave up to make room.", now.evicted_tokens),
        "num_retracted_requests": ("Answers preempted, to be resumed.", now.preemptions),
        "engine_steps": ("Forward passes for requests.", now.steps),
        "healed_prompts": ("Prompts computed exactly after approximate service.", now.healed),
        "healed_tokens": ("Prompt tokens computed for that, in idle moments.", now.healed_tokens),
        "preempted_heals": ("Prompts being healed when a request came.", now.heals_preempted),
        "dropped_heals": (
            "Prompts never healed: too many waited, no room, or a fault.",
            now.heals_dropped,
        ),
        "dropped_event_batches": ("Cache events not published.", now.dropped_event_batches),
    }
