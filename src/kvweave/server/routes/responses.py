"""POST /v1/responses, and GET and DELETE of stored ones: OpenAI's Responses protocol."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Query, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from kvweave.engine.types import OutputDelta
from kvweave.errors import RequestError
from kvweave.server import schemas
from kvweave.server.errors import body_of
from kvweave.server.fields import Number, Whole
from kvweave.server.metrics import RequestMetrics, usage_body
from kvweave.server.protocol import ChatBody, RequestBody
from kvweave.server.responses import ResponseStore, scored_tokens
from kvweave.server.schemas import answers
from kvweave.server.service import ReadChat, Service, chat_body, joined, start_chat
from kvweave.server.streaming import Batch, Generation, GenerationResponse
from kvweave.server.tools import AnswerPart, CallPart, ReasoningPart, TextPart

_Salt = Annotated[str | None, Query(max_length=256)]
_SCORES = "message.output_text.logprobs"
"""The value of `include` that asks for log probabilities."""


class ResponsesBody(RequestBody):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool = True
    max_output_tokens: Whole | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_logprobs: Whole | None = None
    include: list[str] = []
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    truncation: str | None = None
    move_volatile_head: bool = False

    NAMES: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "verbosity": "text.verbosity",
        "reasoning_effort": "reasoning.effort",
        "messages": "input",
    }
    """Fields of the internal request, by other names than here."""

    @model_validator(mode="after")
    def _whole_prompts(self) -> ResponsesBody:
        if self.truncation not in (None, "disabled"):
            raise RequestError(
                "truncation is disabled here: a prompt is served whole or not at all",
                param="truncation",
            )
        return self

    @property
    def scored(self) -> bool:
        return _SCORES in self.include or bool(self.top_logprobs)

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    def chat(self, turns: Sequence[dict[str, Any]]) -> ChatBody:
        """The internal request, for all turns of the conversation."""
        said = [{"role": "system", "content": self.instructions}] if self.instructions else []
        optional: dict[str, Any] = {}
        if self.tools:
            tools = [_tool(tool, f"tools.{at}") for at, tool in enumerate(self.tools)]
            optional["tools"] = tools
            optional["parallel_tool_calls"] = self.parallel_tool_calls
        return chat_body(
            self,
            self.NAMES,
            messages=[*said, *turns],
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.scored or None,
            top_logprobs=self.top_logprobs if self.scored else None,
            tool_choice=_tool_choice(self.tool_choice),
            response_format=_response_format(self.text.get("format")),
            verbosity=self.text.get("verbosity"),
            reasoning_effort=self.reasoning.get("effort"),
            move_volatile_head=self.move_volatile_head,
            **optional,
        )


ResponsesBody.ELSEWHERE = dict.fromkeys(
    (ChatBody.model_fields.keys() | {"prompt"}) - ResponsesBody.model_fields.keys(),
    "/v1/chat/completions or /v1/completions",
)


def responses_router(service: Service) -> APIRouter:
    """The routes, bound to `service`."""
    router = APIRouter()
    store = ResponseStore(service.config.max_stored_responses)

    @router.post(
        "/v1/responses",
        response_class=Response,
        responses=answers(schemas.ResponseAnswer, 404, 429, event=schemas.NamedEvent),
    )
    async def create_response(body: ResponsesBody) -> Response:
        earlier: Sequence[dict[str, Any]] = ()
        if body.previous_response_id is not None:
            name, param = body.previous_response_id, "previous_response_id"
            earlier = store.find(name, body.cache_salt, param).turns
        turns = joined([*earlier, *_turns(body.items)], ("assistant",))
        generation, chat = await start_chat(
            service, body.chat(turns), endpoint="responses", names=body.NAMES
        )
        kept = store if body.store else None
        writer = _ResponseWriter(generation, chat, body, service, kept, turns)
        return GenerationResponse(generation, writer, stream=body.stream)

    @router.api_route(  # one route: of two, a 405 would name the methods of the first only
        "/v1/responses/{response_id}",
        methods=["GET", "DELETE"],
        response_model=None,
        responses=answers(schemas.ResponseAnswer | schemas.ResponseDeleted, 404),
    )
    async def stored_response(
        request: Request, response_id: str, cache_salt: _Salt = None, stream: bool = False
    ) -> dict[str, Any]:
        if request.method == "DELETE":
            store.delete(response_id, cache_salt)
            return {"id": response_id, "object": "response", "deleted": True}
        if stream:
            raise RequestError("a stored response is sent whole: stream: false", param="stream")
        return store.find(response_id, cache_salt).response

    @router.get(
        "/v1/responses/{response_id}/input_items",
        response_model=None,
        responses=answers(schemas.InputItems, 404),
    )
    async def list_input_items(response_id: str, cache_salt: _Salt = None) -> dict[str, Any]:
        items = list(reversed(store.find(response_id, cache_salt).items))  # the latest first
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
        return {"object": "list", "data": items, "has_more": False, **ends}

    return router


# From items to the messages of a chat.


def _turns(items: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    for at, item in enumerate(items):
        where = f"input.{at}"
        match item.get("type", "message"):
            case "message":
                content = _content(item.get("content"), f"{where}.content")
                yield {"role": item.get("role"), "content": content}
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                yield {"role": "assistant", "content": [], "tool_calls": [call]}
            case "function_call_output":
                output = _content(item.get("output"), f"{where}.output")
                yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            case "reasoning":
                parts = item.get("content") or item.get("summary") or ()
                if not isinstance(parts, list | tuple) or not all(
                    isinstance(part, dict) for part in parts
                ):
                    raise RequestError(f"{where} holds a list of texts", param=where)
                thought = "\n".join(str(part.get("text", "")) for part in parts)
                yield {"role": "assistant", "content": [], "reasoning_content": thought}
            case other:
                raise RequestError(
                    f"{where} is of type {str(other)[:80]}: items are messages, function calls, "
                    "their outputs, and reasoning",
                    param=where,
                )


def _content(content: Any, where: str) -> list[dict[str, Any]]:
    """A text or parts of text, as the parts of a chat's message."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where} is a text or a list of parts", param=where)
    parts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if kind not in ("input_text", "output_text", "refusal") or not isinstance(text, str):
            raise RequestError(
                f"{where}.{at} is of type {str(kind)[:80]}: this server reads and writes text",
                param=f"{where}.{at}",
            )
        parts.append({"type": "text", "text": text})
    return parts


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A function as a chat describes it."""
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        kind = str(tool.get("type"))[:80]
        raise RequestError(
            f"{where} is of type {kind}: tools are functions of the client's, with a name",
            param=where,
        )
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def _tool_choice(choice: str | Mapping[str, Any] | None) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(format: Any) -> Any:
    if not isinstance(format, dict) or format.get("type") != "json_schema":
        return format
    return {"type": "json_schema", "json_schema": {k: v for k, v in format.items() if k != "type"}}


class _ResponseWriter:
    """Writes the answer as a response, or as the events that build it up."""

    named_events = True

    def __init__(
        self,
        generation: Generation,
        chat: ReadChat,
        body: ResponsesBody,
        service: Service,
        store: ResponseStore | None,
        turns: Sequence[dict[str, Any]],
    ) -> None:
        self._metrics = generation.metrics[0]
        self._body = body
        self._texts = service.texts
        self._store = store
        self._turns = turns
        self._response = _empty_response(body, service.card.name, store is not None)
        self._response |= chat.notes
        self._output: list[dict[str, Any]] = self._response["output"]
        self._number = 0
        self._parser = chat.plan.make_parser()
        self._scores: list[dict[str, Any]] = []
        """Of tokens whose text is still to come."""
        self._reasoning_tokens = 0

    def add(self, batch: Batch) -> Sequence[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for _, delta in batch:
            if self._number == 0:
                begun = {"response": {**self._response, "output": []}}
                events += [self._event("created", **begun), self._event("in_progress", **begun)]
            self._scores += scored_tokens(self._texts, delta.logprobs)
            parts = self._parser.feed(delta.text)
            if delta.finish_reason is not None:
                parts += self._parser.finish()
            for part in parts:
                events += self._part(part)
            if any(isinstance(part, ReasoningPart) for part in parts):
                self._reasoning_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                events += self._finish(delta)
        return events

    def end(self) -> dict[str, Any]:
        if self._response["status"] == "in_progress":  # aborted before its first token
            self._response["status"] = "cancelled"
        if self._store is not None:
            items = [{"id": f"item_{uuid.uuid4().hex}", **item} for item in self._body.items]
            said = joined([*self._turns, *_turns(self._output)], ("assistant",))
            self._store.add(self._response, items, said, self._body.cache_salt)
        if not self._body.stream:
            return self._response
        done = self._response["status"] == "completed"
        return self._event("completed" if done else "incomplete", response=self._response)

    def failed(self, failure: Exception) -> dict[str, Any]:
        error = body_of(failure)["error"]
        self._response |= {"status": "failed", "usage": self._usage()}
        self._response["error"] = {"code": "server_error", "message": error["message"]}
        return self._event("failed", response=self._response)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def _item_at(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _at(self) -> dict[str, Any]:
        """Where the only part of the last item is."""
        return {**self._item_at(), "content_index": 0}

    def _part(self, part: AnswerPart) -> Iterable[dict[str, Any]]:
        scores, self._scores = self._scores, []
        match part:
            case TextPart(text):
                if self._kind != "message":
                    item = {"type": "message", "role": "assistant", "content": []}
                    first = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                    yield from self._open("msg", item, first)
                content = self._output[-1]["content"][0]
                content["text"] += text
                content["logprobs"] = content["logprobs"] + scores
                yield self._event("output_text.delta", delta=text, logprobs=scores, **self._at())
            case ReasoningPart(text):
                if self._kind != "reasoning":
                    item = {"type": "reasoning", "summary": [], "content": []}
                    yield from self._open("rs", item, {"type": "reasoning_text", "text": ""})
                self._output[-1]["content"][0]["text"] += text
                yield self._event("reasoning_text.delta", delta=text, **self._at())
            case CallPart():
                if part.name is not None:
                    item = {"type": "function_call", "name": part.name}
                    yield from self._open("fc", {**item, "call_id": part.id, "arguments": ""})
                if part.arguments:
                    self._output[-1]["arguments"] += part.arguments
                    at = self._item_at()
                    yield self._event("function_call_arguments.delta", delta=part.arguments, **at)

    @property
    def _kind(self) -> str | None:
        """The last item's type."""
        return self._output[-1]["type"] if self._output else None

    def _open(
        self, prefix: str, item: dict[str, Any], part: dict[str, Any] | None = None
    ) -> Iterable[dict[str, Any]]:
        """The events that begin an item, with its only part."""
        yield from self._close("completed")
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        self._output.append(item)
        index = len(self._output) - 1
        yield self._event("output_item.added", item=dict(item), output_index=index)
        if part is not None:
            yield self._event("content_part.added", part=dict(part), **self._at())
            item["content"] = [part]

    def _close(self, status: str) -> Iterable[dict[str, Any]]:
        """The events that end the last item, if there is one."""
        if not self._output:
            return
        item = self._output[-1]
        item["status"] = status
        match item["type"]:
            case "message":
                part = item["content"][0]
                text = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._event("output_text.done", **text, **self._at())
                yield self._event("content_part.done", part=part, **self._at())
            case "reasoning":
                part = item["content"][0]
                yield self._event("reasoning_text.done", text=part["text"], **self._at())
                yield self._event("content_part.done", part=part, **self._at())
            case "function_call":
                said = {"arguments": item["arguments"], "name": item["name"]}
                yield self._event("function_call_arguments.done", **said, **self._item_at())
        index = len(self._output) - 1
        yield self._event("output_item.done", item=item, output_index=index)

    def _finish(self, delta: OutputDelta) -> Iterable[dict[str, Any]]:
        status = {"stop": "completed", "length": "incomplete"}.get(
            delta.finish_reason or "", "cancelled"
        )
        yield from self._close("completed" if status == "completed" else "incomplete")
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response |= {
            "status": status,
            "completed_at": int(time.time()),
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        return response_usage(self._metrics, self._reasoning_tokens)


def _empty_response(body: ResponsesBody, model: str, stored: bool) -> dict[str, Any]:
    """A response before its first token."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.session,
        "reasoning": {"effort": body.reasoning.get("effort"), "summary": None},
        "store": stored,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": body.text.get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def response_usage(metrics: RequestMetrics, reasoning_tokens: int) -> dict[str, Any]:
    """The usage of an answer, with the names of this protocol."""
    usage = usage_body([metrics])
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }
