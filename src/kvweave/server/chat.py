"""Starts the answer to a conversation, whatever protocol it came by.

Every protocol of conversations turns its body into a ChatBody, the internal request; so rendering,
sampling parameters and checks are the same for all.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from kvweave.engine.types import SamplingParams
from kvweave.errors import RequestError
from kvweave.server.answer_plans import constrained
from kvweave.server.prompts import Conversation
from kvweave.server.protocol import ChatBody, RequestBody
from kvweave.server.reordering import ordered
from kvweave.server.service import Service
from kvweave.server.streaming import Generation
from kvweave.server.tools import AnswerPlan


class StartedChat(NamedTuple):
    """A conversation that is being answered."""

    generation: Generation
    plan: AnswerPlan
    """How its answers are read."""
    notes: dict[str, Any]
    """Fields of the answer that say how the prompt was changed: with `reorder`, `kvweave_order`;
    with `move_volatile_head`, `kvweave_volatile_head`."""


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


async def start_chat(
    service: Service,
    body: ChatBody,
    *,
    endpoint: str = "chat",
    names: Mapping[str, str] = MappingProxyType({}),
) -> StartedChat:
    """Render the conversation and hand it to the engine.

    `endpoint` names the protocol in the log; `names`: what fields are called in the client's body.
    """
    service.card.require(body.model)
    chat = await read_chat(service, body, names)
    generation = service.generation(
        body,
        [chat.prompt.ids],
        [chat.sampling],
        endpoint=endpoint,
        names={"prompt": names.get("messages", "messages"), **names},
        protected_from=chat.prompt.last_turn,
    )
    return StartedChat(generation, chat.plan, chat.notes)


class ReadChat(NamedTuple):
    """A conversation as tokens, and what is asked of its answers."""

    prompt: Conversation
    sampling: SamplingParams
    plan: AnswerPlan
    notes: dict[str, Any]


async def read_chat(service: Service, body: ChatBody, names: Mapping[str, str]) -> ReadChat:
    """Render a conversation and plan its answers; `names` as for `start_chat`."""
    with _named(names):
        return await _read(service, body)


async def _read(service: Service, body: ChatBody) -> ReadChat:
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
