"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from kvweave.engine.types import OutputDelta
from kvweave.errors import RequestError
from kvweave.server.errors import anthropic_error, body_of
from kvweave.server.fields import Number, Stops, Whole
from kvweave.server.metrics import RequestMetrics
from kvweave.server.protocol import ChatBody, RequestBody, longest_mark
from kvweave.server.schemas import CountedTokens, MessageAnswer, NamedEvent, answers
from kvweave.server.service import ReadChat, Service, chat_body, joined, read_chat, start_chat
from kvweave.server.streaming import Batch, Generation, GenerationResponse
from kvweave.server.tools import AnswerPart, CallPart, ReasoningPart, TextPart


class CountTokensBody(RequestBody):
    """What makes the prompt of a message, for counting its tokens."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    move_volatile_head: bool = False

    NAMES: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
    }
    """Fields of the internal request, by other names than here."""

    def chat(self, **more: Any) -> ChatBody:
        """The internal request."""
        messages = _turns(self.messages)
        if system := _texts(self.system or "", "system"):
            messages.insert(0, {"role": "system", "content": system})
        choice = self.tool_choice or {}
        prefilled = messages[-1]["role"] == "assistant"
        if prefilled:
            _check_prefill(messages[-1])
        return chat_body(
            self,
            self.NAMES,
            messages=messages,
            tools=[_tool(tool, f"tools.{at}") for at, tool in enumerate(self.tools or ())],
            continue_final_message=prefilled,
            tool_choice=_tool_choice(choice),
            parallel_tool_calls=not choice.get("disable_parallel_tool_use", False),
            response_format=_response_format((self.output_config or {}).get("format")),
            reasoning_effort=self._effort(),
            move_volatile_head=self.move_volatile_head,
            **self._retention(),
            **more,
        )

    def _retention(self) -> dict[str, Any]:
        """The longest wish of any block that the cache keeps its KV."""
        contents = (each.get("content") for each in self.messages)
        own = self.model_dump()["cache_control"]
        longest = longest_mark(own, self.system, self.tools, *contents)
        return {} if longest is None else {"cache_control": longest}

    def _effort(self) -> str | None:
        config = self.output_config or {}
        kind = (self.thinking or {"type": "adaptive"}).get("type")
        if kind == "disabled":
            return "none"
        if kind != "adaptive":
            raise RequestError(
                "thinking is adaptive or disabled: here it has no budget of its own, so set "
                "max_tokens",
                param="thinking",
            )
        effort = config.get("effort")
        # The API's default asks for nothing.
        return None if effort in (None, "high") else str(effort)


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Whole
    stop_sequences: Stops = ()
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None

    def chat(self, **more: Any) -> ChatBody:
        return super().chat(
            max_completion_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            **more,
        )


for _body in (CountTokensBody, MessagesBody):
    _body.ELSEWHERE = dict.fromkeys(
        ChatBody.model_fields.keys() - MessagesBody.model_fields.keys(), "/v1/chat/completions"
    )


def messages_router(service: Service) -> APIRouter:
    """The two routes, bound to `service`."""
    router = APIRouter()

    @router.post(
        "/v1/messages",
        response_class=Response,
        responses=answers(MessageAnswer, 404, 429, event=NamedEvent),
    )
    async def create_message(body: MessagesBody) -> Response:
        generation, chat = await start_chat(
            service, body.chat(), endpoint="messages", names=body.NAMES
        )
        writer = _MessageWriter(generation, chat, body, service.card.name)
        return GenerationResponse(generation, writer, stream=body.stream)

    @router.post(
        "/v1/messages/count_tokens", response_model=None, responses=answers(CountedTokens, 404)
    )
    async def count_message_tokens(body: CountTokensBody) -> dict[str, Any]:
        service.card.require(body.model)
        chat = await read_chat(service, body.chat(), body.NAMES)
        return {"input_tokens": len(chat.prompt.ids)}

    return router


# From Anthropic's blocks to the messages of a chat.


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as a chat has them; neighbours of one role are one turn."""
    return joined(_each_turn(messages), ("system", "user", "assistant"))


def _each_turn(messages: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    for at, message in enumerate(messages):
        where = f"messages.{at}"
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{where}.role is user or assistant", param=f"{where}.role")
        blocks = _blocks(message.get("content"), f"{where}.content")
        yield from _of_assistant(blocks) if role == "assistant" else _of_user(role, blocks)


def _of_user(
    role: str, blocks: Sequence[tuple[str, Mapping[str, Any]]]
) -> Iterable[dict[str, Any]]:
    """A message, and before, between or behind its texts the results of calls."""
    for where, block in blocks:
        if block.get("type") == "tool_result":
            texts = _texts(block.get("content") or "", f"{where}.content")
            if block.get("is_error"):
                texts.insert(0, {"type": "text", "text": "Error:"})
            call = str(block.get("tool_use_id", ""))
            yield {"role": "tool", "tool_call_id": call, "content": texts}
        else:
            yield {"role": role, "content": [_text(block, where)]}


def _of_assistant(
    blocks: Sequence[tuple[str, Mapping[str, Any]]],
) -> Iterable[dict[str, Any]]:
    turn: dict[str, Any] = {"role": "assistant", "content": []}
    for where, block in blocks:
        match block.get("type"):
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                call = {"id": block.get("id"), "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            case "thinking":
                turn["reasoning_content"] = str(block.get("thinking", ""))
            case "redacted_thinking":
                pass  # encrypted
            case _:
                turn["content"].append(_text(block, where))
    yield turn


def _check_prefill(last: Mapping[str, Any]) -> None:
    """RequestError unless the answer may continue this message."""
    if last.get("tool_calls"):
        raise RequestError(
            "the last message calls tools, and no tool_result answers them", param="messages"
        )
    text = last["content"][-1]["text"] if last["content"] else ""
    if not text or text != text.rstrip():
        raise RequestError(
            "the last message is the assistant's, which the answer continues: it must have a "
            "text, and must not end in a space or line end",
            param="messages",
        )


def _blocks(content: Any, where: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Blocks with their places; a text is one block."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"{where} is a text or a list of blocks", param=where)
    return [(f"{where}.{at}", block) for at, block in enumerate(content)]


def _texts(content: Any, where: str) -> list[dict[str, Any]]:
    return [_text(block, at) for at, block in _blocks(content, where) if block.get("text") != ""]


def _text(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A block of text as a part; its `cache_control` holds for the whole prompt."""
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        kind = str(block.get("type"))[:80]
        raise RequestError(
            f"{where} is of type {kind}: this server reads blocks of text, calls and their results",
            param=where,
        )
    return {"type": "text", "text": block["text"]}


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A client's tool as a function of a chat."""
    if tool.get("type") not in (None, "custom") or not isinstance(tool.get("name"), str):
        kind = str(tool.get("type"))[:80]
        raise RequestError(
            f"{where} is of type {kind}: tools are the client's own, with name and input_schema",
            param=where,
        )
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    """OpenAI's spelling of the same choice."""
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in (None, "auto", "any", "none"):
        raise RequestError("tool_choice is auto, any, tool or none", param="tool_choice")
    return "required" if kind == "any" else kind


def _response_format(format: Any) -> Any:
    if not isinstance(format, Mapping) or format.get("type") != "json_schema":
        return format
    schema = {"name": "output", "strict": True, "schema": format.get("schema")}
    return {"type": "json_schema", "json_schema": schema}


class _MessageWriter:
    """Writes the answer as a message, or as the events that build it up."""

    named_events = True

    def __init__(
        self, generation: Generation, chat: ReadChat, body: MessagesBody, model: str
    ) -> None:
        self._metrics = generation.metrics[0]
        self._stops = body.stop_sequences
        self._max_tokens = body.max_tokens
        self._stream = body.stream
        self._blocks: list[dict[str, Any]] = []
        self._message: dict[str, Any] = {
            "id": f"msg_{generation.rid}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "stop_reason": None,
            "stop_sequence": None,
            **chat.notes,
        }
        self._begun = False
        self._parser = chat.plan.make_parser()

    def add(self, batch: Batch) -> Sequence[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for _, delta in batch:
            if not self._begun:
                self._begun = True
                start = {**self._message, "content": [], "usage": self._usage()}
                events.append({"type": "message_start", "message": start})
            parts = self._parser.feed(delta.text)
            if delta.finish_reason is not None:
                parts += self._parser.finish()
            for part in parts:
                events += self._part(part)
            if delta.finish_reason is not None:
                events += self._finish(delta)
        return events

    def end(self) -> dict[str, Any]:
        if self._stream:
            return {"type": "message_stop"}
        content = [_whole(block) for block in self._blocks]
        return {**self._message, "content": content, "usage": self._usage()}

    def failed(self, failure: Exception) -> dict[str, Any]:
        return anthropic_error(body_of(failure), getattr(failure, "status", 500))

    def _part(self, part: AnswerPart) -> Iterable[dict[str, Any]]:
        match part:
            case TextPart(text):
                yield from self._grow("text", "text", text, {"type": "text_delta", "text": text})
            case ReasoningPart(text):
                delta = {"type": "thinking_delta", "thinking": text}
                yield from self._grow("thinking", "thinking", text, delta)
            case CallPart():
                if part.name is not None:
                    name = f"toolu_{(part.id or '').removeprefix('call_')}"
                    block = {"type": "tool_use", "id": name, "name": part.name, "input": {}}
                    yield from self._open(block)
                    self._blocks[-1]["input"] = ""  # the JSON so far
                if part.arguments:
                    self._blocks[-1]["input"] += part.arguments
                    delta = {"type": "input_json_delta", "partial_json": part.arguments}
                    yield self._delta(delta)

    def _grow(
        self, kind: str, field: str, text: str, delta: dict[str, Any]
    ) -> Iterable[dict[str, Any]]:
        """More of the last block, or the first of a new one if the last is of another kind."""
        if not self._blocks or self._blocks[-1]["type"] != kind:
            signed = {"signature": ""} if kind == "thinking" else {}
            yield from self._open({"type": kind, field: "", **signed})
        self._blocks[-1][field] += text
        yield self._delta(delta)

    def _open(self, block: dict[str, Any]) -> Iterable[dict[str, Any]]:
        yield from self._close()
        self._blocks.append(dict(block))
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": block}

    def _close(self) -> Iterable[dict[str, Any]]:
        if self._blocks:
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        index = len(self._blocks) - 1
        return {"type": "content_block_delta", "index": index, "delta": delta}

    def _finish(self, delta: OutputDelta) -> Iterable[dict[str, Any]]:
        yield from self._close()
        reason = self._stop_reason(delta)
        matched = delta.matched_stop if reason == "stop_sequence" else None
        end = {"stop_reason": reason, "stop_sequence": matched}
        self._message |= end
        yield {"type": "message_delta", "delta": end, "usage": self._usage()}

    def _stop_reason(self, delta: OutputDelta) -> str:
        match delta.finish_reason:
            case "length":
                full = self._metrics.completion_tokens < self._max_tokens
                return "model_context_window_exceeded" if full else "max_tokens"
            case "abort":  # the server ended it: the client may send the answer back as prefill
                return "pause_turn"
        if any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use"
        return "stop_sequence" if delta.matched_stop in self._stops else "end_turn"

    def _usage(self) -> dict[str, int]:
        return message_usage(self._metrics)


def _whole(block: dict[str, Any]) -> dict[str, Any]:
    """A block as a message holds it: with a call's arguments as an object.

    Arguments that the limit cut off are under the name that Anthropic has for such.
    """
    if block["type"] != "tool_use":
        return block
    try:
        arguments = json.loads(block["input"] or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"INVALID_JSON": block["input"]}
    return {**block, "input": arguments}


def message_usage(metrics: RequestMetrics) -> dict[str, int]:
    """Anthropic's usage: the first three figures add up to the prompt.

    Tokens read from the cache were not computed: exact, moved and paraphrased ones, of which the
    last two are also named. Created are those that were computed and are now cached.
    """
    usage = metrics.usage
    read = usage.cached_tokens + usage.moved_tokens + usage.paraphrase_tokens
    written = min(usage.cache_write_tokens, usage.prompt_tokens - read)
    return {
        "input_tokens": usage.prompt_tokens - read - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": metrics.completion_tokens,
        "moved_tokens": usage.moved_tokens,
        "paraphrase_tokens": usage.paraphrase_tokens,
    }
