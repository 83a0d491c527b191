"""From a request of any protocol to a running generation: the state that all endpoints share.

Every protocol of conversations turns its body into a ChatBody, the internal request; so rendering,
sampling parameters and checks are the same for all.
"""

from __future__ import annotations

import uuid
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from kvweave.config import ServerConfig
from kvweave.engine.types import GenerateRequest, SamplingParams
from kvweave.errors import RequestError
from kvweave.server.answer_plans import AnswerPlanner, constrained
from kvweave.server.logs import current_rid
from kvweave.server.metrics import Metrics, RequestMetrics, RequestObserver
from kvweave.server.model_card import ModelCard
from kvweave.server.prompts import Conversation, PromptReader
from kvweave.server.protocol import ChatBody, GenerationBody, RequestBody
from kvweave.server.reordering import VolatileHead, ordered
from kvweave.server.responses import Envelope, Format, PlainWriter, StreamWriter, TokenTexts
from kvweave.server.streaming import Generation, GenerationResponse, LiveGenerations, ServingEngine
from kvweave.server.tools import AnswerPlan


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

    def generate(
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


# Conversations.


def chat_body(body: RequestBody, names: Mapping[str, str], **fields: Any) -> ChatBody:
    """The internal request of another protocol's `body`, with the same shared fields.

    `names`: what fields of ChatBody are called in `body`, for refusals (RequestError).
    """
    shared = body.model_dump(include=set(RequestBody.model_fields), exclude_unset=True)
    with _named(names):
        try:
            return ChatBody.model_validate({**shared, **fields})
        except ValidationError as wrong:
            problem = wrong.errors()[0]
            param = ".".join(map(str, problem["loc"]))
            reason = problem.get("ctx", {}).get("error") or problem["msg"]
            raise RequestError(f"{names.get(param, param)}: {reason}", param=param) from None


@contextmanager
def _named(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals inside name the client's field."""
    try:
        yield
    except RequestError as wrong:
        wrong.param = names.get(wrong.param or "", wrong.param)
        raise


def joined(turns: Iterable[dict[str, Any]], roles: Container[str]) -> list[dict[str, Any]]:
    """The messages with neighbours of one role as one turn, for these roles.

    Contents are lists of parts. Templates may refuse two turns of one role, and calls that stand
    apart from the text before them.
    """
    found: list[dict[str, Any]] = []
    for turn in turns:
        before = found[-1] if found else {}
        if before.get("role") != turn["role"] or turn["role"] not in roles:
            found.append(turn)
            continue
        whole = {**before, **turn, "content": [*before["content"], *turn["content"]]}
        if calls := [*before.get("tool_calls", ()), *turn.get("tool_calls", ())]:
            whole["tool_calls"] = calls
        found[-1] = whole
    return found


class ReadChat(NamedTuple):
    """A conversation as tokens, and what is asked of its answers."""

    prompt: Conversation
    sampling: SamplingParams
    plan: AnswerPlan
    """How its answers are read."""
    notes: dict[str, Any]
    """Fields of the answer that say how the prompt was changed: with `reorder`, `kvweave_order`;
    with `move_volatile_head`, `kvweave_volatile_head`."""


async def start_chat(
    service: Service,
    body: ChatBody,
    *,
    endpoint: str = "chat",
    names: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Generation, ReadChat]:
    """Render the conversation and hand it to the engine.

    `endpoint` names the protocol in the log; `names`: what fields are called in the client's body.
    """
    service.card.require(body.model)
    chat = await read_chat(service, body, names)
    generation = service.generate(
        body,
        [chat.prompt.ids],
        [chat.sampling],
        endpoint=endpoint,
        names={"prompt": names.get("messages", "messages"), **names},
        protected_from=chat.prompt.last_turn,
    )
    return generation, chat


async def read_chat(service: Service, body: ChatBody, names: Mapping[str, str]) -> ReadChat:
    """Render a conversation and plan its answers; `names` as for `start_chat`."""
    with _named(names):
        reader, chat, notes = service.reader, body.conversation(), {}
        scored = (body.top_logprobs or 0) if body.logprobs else None
        words = reader.spellings(body.bad_words)
        sampling = body.sampling(
            **service.sampling, max_tokens=None, logprobs=scored, bad_words_ids=words
        )
        if body.move_volatile_head:
            chat, notes["kvweave_volatile_head"] = service.volatile_head.moved(chat)
        if body.reorder is None:
            prompt = await reader.conversation(chat)
        else:
            prompt, notes["kvweave_order"] = await ordered(
                reader, service.engine, chat, body.reorder, body.cache_salt
            )
        plan = service.planner.plan(
            prompt.ids,
            choice=body.choice(),
            grammar=sampling.grammar,
            separate_reasoning=body.separate_reasoning,
        )
        return ReadChat(prompt, constrained(plan, sampling), plan, notes)
