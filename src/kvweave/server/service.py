"""State that all endpoints share: the engine, the model's facts, the running generations."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvweave.config import ServerConfig
from kvweave.engine.types import EngineSnapshot, GenerateRequest, SamplingParams
from kvweave.server.answer_plans import AnswerPlanner
from kvweave.server.logs import current_rid
from kvweave.server.metrics import Metrics
from kvweave.server.model_card import ModelCard
from kvweave.server.prompts import PromptReader
from kvweave.server.protocol import GenerationBody, RequestBody
from kvweave.server.request_metrics import RequestMetrics, RequestObserver
from kvweave.server.responses import Envelope, Format, PlainWriter, StreamWriter, TokenTexts
from kvweave.server.streaming import DeltaSource, Generation, GenerationResponse, LiveGenerations
from kvweave.server.volatile import VolatileHead

if TYPE_CHECKING:
    from kvweave.engine.engine import Engine


T = TypeVar("T")


class ServingEngine(DeltaSource, Protocol):
    """The part of an engine that a server uses; `engine.AsyncEngine` is one."""

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


class Service:
    """The state behind the routes."""

    def __init__(
        self,
        engine: ServingEngine,
        card: ModelCard,
        config: ServerConfig,
        observer: RequestObserver | None = None,
    ) -> None:
        self.engine = engine
        self.card = card
        self.config = config
        self.metrics = Metrics(card.name, engine.snapshot)
        self.reader = PromptReader(engine.tokenizer, card, describe_tools=config.describe_tools)
        self.planner = AnswerPlanner(
            self.reader,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        self.texts = TokenTexts(engine.tokenizer)
        self.sampling = dict(card.sampling) if config.sampling_defaults == "model" else {}
        """Parameters of requests that do not name them."""
        self.volatile_head = VolatileHead(config.volatile_head)
        self.live = LiveGenerations()
        self.observer = observer
        """Gets every prompt that has ended."""

    def respond(
        self,
        generation: Generation,
        body: GenerationBody,
        form: Format,
        *,
        id_prefix: str,
        notes: Mapping[str, Any] = MappingProxyType({}),
    ) -> GenerationResponse:
        """OpenAI's response, with choices in `form`; `notes` are further fields of it."""
        envelope = Envelope(
            id=id_prefix + generation.rid,
            model=self.card.name,
            body=body,
            metrics=generation.metrics,
            notes=notes,
        )
        writer = (StreamWriter if body.stream else PlainWriter)(envelope, form)
        return GenerationResponse(generation, writer, stream=body.stream)

    def generation(
        self,
        body: RequestBody,
        prompts: Sequence[tuple[int, ...]],
        sampling: Sequence[SamplingParams],
        *,
        endpoint: str,
        names: Mapping[str, str] = MappingProxyType({}),
        protected_from: int | None = None,
    ) -> Generation:
        """Runs `prompts`, each with its own parameters, as the body of any protocol asks.

        `names`: what fields of the engine's request are called in the body, for refusals.
        """
        rid = body.rid or uuid.uuid4().hex
        current_rid.set(rid)  # until this HTTP request's task ends
        requests = [
            GenerateRequest(
                rid=rid if len(prompts) == 1 else f"{rid}-{place}",
                prompt_ids=ids,
                sampling=sampling[place],
                priority=body.priority,
                cache_salt=body.cache_salt,
                fuzzy=body.fuzzy,
                protected_from=protected_from,
                fuzzy_refresh=body.fuzzy_refresh,
                fuzzy_semantic=body.fuzzy_semantic,
                session=body.session,
                retain_seconds=body.retain_seconds,
            )
            for place, ids in enumerate(prompts)
        ]
        metrics = [
            RequestMetrics(
                request,
                self.metrics,
                endpoint=endpoint,
                logged=self.config.log_requests,
                observer=self.observer,
            )
            for request in requests
        ]
        return Generation(rid, requests, metrics, source=self.engine, live=self.live, names=names)
