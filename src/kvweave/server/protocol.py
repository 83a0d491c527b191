"""Request bodies of the HTTP endpoints. Names are OpenAI's; vLLM's and SGLang's otherwise.

Fields of those servers that are not served are in `fields`. SamplingParams checks the ranges.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvweave.engine.types import RANGES, SamplingParams
from kvweave.errors import RequestError
from kvweave.server.fields import (
    AllowedIds,
    BadWords,
    CacheSalt,
    Content,
    LogitBias,
    Number,
    Prompts,
    Rid,
    StopIds,
    Stops,
    ToolCalls,
    Whole,
    refuse_unserved,
)
from kvweave.server.grammars import FIELDS, requested_grammar
from kvweave.server.prompts import ChatPrompt
from kvweave.server.reordering import Reorder
from kvweave.server.tools import ToolChoice, tool_choice


class ChatMessage(BaseModel):
    """One message; its other fields (name, tool_call_id, ...) go to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: Content = None
    tool_calls: ToolCalls = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, message: Any) -> Any:
        """Without fields that are null: clients send back answers with all of their fields."""
        if not isinstance(message, dict):
            return message
        if message.get("function_call"):
            raise ValueError("function_call is not offered: write tool_calls")
        return {name: value for name, value in message.items() if value is not None}

    def for_template(self) -> dict[str, Any]:
        """As ChatPrompt holds it: without fields that say nothing, and with a content."""
        said = self.model_dump(exclude_unset=True)
        if not self.tool_calls:
            said.pop("tool_calls", None)
        return {**said, "content": self.content or ""}


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    ELSEWHERE: ClassVar[dict[str, str]] = {}
    """Fields that only another endpoint serves, and its path."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        refuse_unserved(body, cls.model_fields.keys(), cls.ELSEWHERE)
        # null is the same as a field left out: the default holds.
        return {name: value for name, value in body.items() if value is not None}


RETAINED_SECONDS = 600.0
"""For a session, and for OpenAI's in-memory retention."""


class CacheControl(BaseModel):
    """Anthropic's wish that the cache keeps the KV of this prompt."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> float:
        return 300.0 if self.ttl == "5m" else 3600.0


def longest_mark(own: object, *contents: object) -> dict[str, Any] | None:
    """The `cache_control` that keeps KV longest: a request's own, or of any block in `contents`."""
    blocks = (block for each in contents if isinstance(each, list) for block in each)
    marks = [own, *(block.get("cache_control") for block in blocks if isinstance(block, dict))]
    said = [mark for mark in marks if isinstance(mark, dict)]
    return max(said, key=lambda mark: bool(mark.get("ttl") == "1h"), default=None)


class StreamOptions(_Body):
    """Whether a stream ends with a chunk of usage, or carries it in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


def _show_ranges(schema: dict[str, Any]) -> None:
    """Show ranges in the schema; SamplingParams checks them."""
    for name, low, high in RANGES:
        shown = schema["properties"].get(name, {})
        for number in shown.get("anyOf", [shown]):
            if number.get("type") in ("integer", "number"):
                least = "exclusiveMinimum" if name == "top_p" else "minimum"
                number |= {least: low, "maximum": high}


_answer_format: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "json_object"]}},
    "required": ["type"],
    "additionalProperties": False,
}
"""Not all that is served: a json_schema may be one that cannot be compiled."""


class RequestBody(_Body):
    """The fields of all endpoints that generate: which request it is, and what KV it may use."""

    model: str | None = None
    stream: bool = False
    rid: Rid | None = None
    priority: Whole = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: CacheSalt | None = None
    fuzzy: bool = True
    fuzzy_refresh: Number | None = Field(None, ge=0, le=1)
    fuzzy_semantic: bool = True
    prompt_cache_key: CacheSalt | None = None
    session_id: CacheSalt | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    cache_control: CacheControl | None = None

    @property
    def session(self) -> str | None:
        """What requests share that may lend each other KV that is not exact."""
        return self.prompt_cache_key if self.session_id is None else self.session_id

    @property
    def retain_seconds(self) -> float:
        """For how long the cache should rather evict what others have left in it."""
        wanted = 0.0 if self.session is None else RETAINED_SECONDS
        if self.prompt_cache_retention is not None:
            long = self.prompt_cache_retention == "24h"
            wanted = max(wanted, 24 * 3600.0 if long else RETAINED_SECONDS)
        return wanted if self.cache_control is None else max(wanted, self.cache_control.seconds)

    @model_validator(mode="after")
    def _one_session(self) -> RequestBody:
        if None not in (self.prompt_cache_key, self.session_id) and (
            self.prompt_cache_key != self.session_id
        ):
            raise RequestError(
                "prompt_cache_key and session_id name two sessions: send one of them",
                param="session_id",
            )
        return self


class GenerationBody(RequestBody):
    """The fields of both completion endpoints."""

    model_config = ConfigDict(json_schema_extra=_show_ranges)

    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    """The newer name of `max_tokens`, which wins."""
    min_tokens: Whole = 0
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    seed: Whole | None = None
    n: Whole | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedIds | None = None
    bad_words: BadWords = ()
    stop: Stops = ()
    stop_token_ids: StopIds = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    response_format: dict[str, Any] | None = Field(
        None, json_schema_extra={"anyOf": [_answer_format, {"type": "null"}]}
    )
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    """Let the tokenizer add its own; by default to a text, not to a conversation."""
    return_plan: bool = False

    def sampling(self, **more: Any) -> SamplingParams:
        """The engine's parameters; fields that the client left out keep the engine's defaults."""
        said = {name: getattr(self, name) for name in _PASSED_ON & self.model_fields_set}
        if self.max_completion_tokens is not None:
            said["max_tokens"] = self.max_completion_tokens
        said["grammar"] = requested_grammar({name: getattr(self, name) for name in FIELDS})
        params = SamplingParams(**{**more, **said})
        try:
            params.validate()
        except RequestError as wrong:
            if wrong.param == "max_tokens" and self.max_completion_tokens is not None:
                wrong.param = "max_completion_tokens"
            raise
        return params

    @model_validator(mode="after")
    def _served_as_asked(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is only allowed with stream: true", param="stream_options"
            )
        requested_grammar({name: getattr(self, name) for name in FIELDS})
        return self


_PASSED_ON = {
    field.name for field in dataclasses.fields(SamplingParams)
} & GenerationBody.model_fields.keys() - {"grammar"}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool = False
    logprobs: Whole | None = None
    best_of: Whole | None = None

    @model_validator(mode="after")
    def _best_of(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                "best_of is not offered: ask for n answers with logprobs and choose among them",
                param="best_of",
            )
        return self


class ConversationBody(_Body):
    """The fields that make a conversation's prompt."""

    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = Field(None, max_length=64)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """Open the assistant's turn: yes, unless the last message is to be continued."""
    continue_final_message: bool = False
    add_special_tokens: bool | None = None

    def conversation(self) -> ChatPrompt:
        """The prompt that the messages make; there must be some."""
        assert self.messages is not None
        return ChatPrompt(
            messages=[message.for_template() for message in self.messages],
            tools=self.tools,
            documents=self.documents,
            reasoning_effort=self.reasoning_effort,
            variables=self.chat_template_kwargs or {},
            add_generation_prompt=not self.continue_final_message
            if self.add_generation_prompt is None
            else self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            add_special_tokens=bool(self.add_special_tokens),
        )

    @model_validator(mode="after")
    def _one_end(self) -> ConversationBody:
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: the last "
                "message is either continued or answered",
                param="continue_final_message",
            )
        return self


class ChatBody(ConversationBody, GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        None, json_schema_extra={"anyOf": [{"enum": ["none", "auto"]}, {"type": "null"}]}
    )
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True
    include_reasoning: bool = True
    modalities: list[str] | None = Field(
        None, json_schema_extra={"anyOf": [{"const": ["text"]}, {"type": "null"}]}
    )
    reorder: Reorder | None = None
    move_volatile_head: bool = False

    def conversation(self) -> ChatPrompt:
        prompt = super().conversation()
        return replace(prompt, tools=None) if self.tool_choice == "none" else prompt

    def choice(self) -> ToolChoice:
        """Which tools an answer may or must call; RequestError if there are none such."""
        return tool_choice(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    @model_validator(mode="before")
    @classmethod
    def _marked(cls, body: Any) -> Any:
        """A mark on a part, which clients of several providers send, holds for the whole prompt."""
        messages = body.get("messages") if isinstance(body, dict) else None
        if not isinstance(messages, list):
            return body
        contents = (each.get("content") for each in messages if isinstance(each, dict))
        mark = longest_mark(body.get("cache_control"), *contents)
        return body if mark is None else {**body, "cache_control": mark}

    @model_validator(mode="after")
    def _offered(self) -> ChatBody:
        if self.reorder is not None:
            self.reorder.check(self.messages)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                "top_logprobs is only allowed with logprobs: true", param="top_logprobs"
            )
        if self.modalities not in (None, ["text"]):
            raise ValueError("modalities other than text are not offered")
        self.choice()
        return self


CompletionBody.ELSEWHERE = dict.fromkeys(
    ChatBody.model_fields.keys() - CompletionBody.model_fields.keys(), "/v1/chat/completions"
)
ChatBody.ELSEWHERE = dict.fromkeys(
    CompletionBody.model_fields.keys() - ChatBody.model_fields.keys(), "/v1/completions"
)


class TokenizeBody(ConversationBody):
    """POST /tokenize: a text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send either prompt or messages", param="prompt")
        return self


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


class SessionBody(_Body):
    """POST /close_session."""

    session_id: CacheSalt
    cache_salt: CacheSalt | None = None


class AbortBody(_Body):
    """POST /abort_request."""

    rid: Rid | None = None
    abort_all: bool = False

    @model_validator(mode="after")
    def _names_a_request(self) -> AbortBody:
        if self.rid is None and not self.abort_all:
            raise RequestError("name a rid, or say abort_all: true", param="rid")
        return self
