"""What clients may send. Names are OpenAI's; vLLM's and SGLang's where OpenAI has none.

Three kinds of field: those that are understood; those that would change the answer but are not
offered, refused in words; everything else is ignored, since clients written for other servers send
it. Ranges are checked once, by SamplingParams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvweave.engine.types import RANGES, SamplingParams
from kvweave.errors import RequestError
from kvweave.server.fields import (
    MAX_MOVABLE,
    CacheSalt,
    Content,
    LogitBias,
    Prompts,
    Rid,
    StopIds,
    Stops,
)

PART_END = "\n"
"""Stands between two parts of a message's content."""


class ChatMessage(BaseModel):
    """One message; what else it carries (name, tool_calls, ...) goes to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: Content = None

    def as_said(self) -> dict[str, Any]:
        """As chat templates want it: parts of the content joined by line ends, as others do."""
        said = self.model_dump(exclude_unset=True)
        if isinstance(self.content, tuple):
            said["content"] = PART_END.join(self.content)
        return said


class Reorder(BaseModel):
    """Neighbouring parts of one message's content that may change places, counted from 0."""

    # A field that is not known may be one that is misspelt, and here that changes the prompt.
    model_config = ConfigDict(extra="forbid", strict=True)

    message: int | None = None
    """The last one without it."""
    parts: list[int] = Field(min_length=2, max_length=MAX_MOVABLE)

    def place(self, messages: Sequence[ChatMessage]) -> int:
        """The message that it is about."""
        return len(messages) - 1 if self.message is None else self.message

    def check(self, messages: Sequence[ChatMessage]) -> None:
        """RequestError if it names what is not there, or what cannot be reordered."""
        at = self.place(messages)
        if not 0 <= at < len(messages):
            raise RequestError(
                f"reorder.message is {at}, but messages go from 0 to {len(messages) - 1}",
                param="reorder.message",
            )
        content = messages[at].content
        if not isinstance(content, tuple):
            raise RequestError(
                f"reorder names parts of messages.{at}.content, which is not a list of parts",
                param="reorder.message",
            )
        first, last = min(self.parts), max(self.parts)
        if first < 0 or last >= len(content):
            raise RequestError(
                f"reorder.parts names part {first if first < 0 else last}, but those of "
                f"messages.{at}.content go from 0 to {len(content) - 1}",
                param="reorder.parts",
            )
        if sorted(self.parts) != list(range(first, last + 1)):
            raise RequestError(
                "reorder.parts must be neighbours, each named once, so that nothing else moves: "
                f"not {self.parts}",
                param="reorder.parts",
            )


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    REFUSED: ClassVar[dict[str, str]] = {}
    """Fields that would change the answer, and why they cannot be had."""

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_said(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, reason in cls.REFUSED.items():
            if body.get(name) not in (None, False, "", [], {}):
                raise RequestError(f"{name} is not offered: {reason}", param=name)
        # null says as much as silence: that the default will do.
        return {name: value for name, value in body.items() if value is not None}


class StreamOptions(_Body):
    """Whether a stream ends with a chunk of usage, or carries it in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


def _show_ranges(schema: dict[str, Any]) -> None:
    """For clients to read; a value out of range is refused by SamplingParams."""
    for name, low, high in RANGES:
        shown = schema["properties"].get(name, {})
        for number in shown.get("anyOf", [shown]):
            if number.get("type") in ("integer", "number"):
                least = "exclusiveMinimum" if name == "top_p" else "minimum"
                number |= {least: low, "maximum": high}


class GenerationBody(_Body):
    """What both completion endpoints understand."""

    model_config = ConfigDict(json_schema_extra=_show_ranges)

    REFUSED: ClassVar[dict[str, str]] = {
        "guided_json": "this server does not constrain what a model may write",
        "guided_regex": "this server does not constrain what a model may write",
        "guided_choice": "this server does not constrain what a model may write",
        "guided_grammar": "this server does not constrain what a model may write",
        "structured_outputs": "this server does not constrain what a model may write",
        "use_beam_search": "answers are sampled, not searched",
        "prompt_embeds": "prompts are text or token ids",
        "lora_path": "this server serves one model, without adapters",
    }

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    stop: Stops = ()
    stop_token_ids: StopIds = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None

    rid: Rid | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: CacheSalt | None = None
    fuzzy: bool = True
    fuzzy_refresh: float | None = Field(None, ge=0, le=1)
    fuzzy_semantic: bool = True
    return_plan: bool = False

    def sampling(self, **more: Any) -> SamplingParams:
        """What the engine is told; fields that the client left out keep the engine's defaults."""
        said = {name: getattr(self, name) for name in _PASSED_ON & self.model_fields_set}
        params = SamplingParams(**{**said, **more})
        params.validate()
        return params

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is only allowed with stream: true", param="stream_options"
            )
        return self


_PASSED_ON = {
    field.name for field in dataclasses.fields(SamplingParams)
} & GenerationBody.model_fields.keys()


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    REFUSED: ClassVar[dict[str, str]] = {
        **GenerationBody.REFUSED,
        "suffix": "the model continues a prompt, it does not fill gaps",
        "reorder": "it is for chat, where a message's content has parts",
    }

    prompt: Prompts
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _best_of(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                "best_of is not offered: ask for n answers with logprobs and choose among them",
                param="best_of",
            )
        return self


_plain_text: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}},
    "additionalProperties": False,
}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    REFUSED: ClassVar[dict[str, str]] = {
        **GenerationBody.REFUSED,
        "functions": "describe them in tools",
        "function_call": "describe functions in tools",
        "audio": "this server answers in text",
        "web_search_options": "this server searches nothing",
    }

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        None, json_schema_extra={"anyOf": [{"enum": ["none", "auto"]}, {"type": "null"}]}
    )
    response_format: dict[str, Any] | None = Field(
        None, json_schema_extra={"anyOf": [_plain_text, {"type": "null"}]}
    )
    modalities: list[str] | None = Field(
        None, json_schema_extra={"anyOf": [{"const": ["text"]}, {"type": "null"}]}
    )
    chat_template_kwargs: dict[str, Any] | None = None
    reorder: Reorder | None = None

    @model_validator(mode="after")
    def _offered(self) -> ChatBody:
        if self.reorder is not None:
            self.reorder.check(self.messages)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                "top_logprobs is only allowed with logprobs: true", param="top_logprobs"
            )
        if (self.response_format or {}).get("type", "text") != "text":
            raise RequestError(
                "response_format other than text is not offered", param="response_format"
            )
        if self.modalities not in (None, ["text"]):
            raise ValueError("modalities other than text are not offered")
        if self.tool_choice not in (None, "none", "auto"):
            raise RequestError(
                "tool_choice is none or auto: a call cannot be enforced", param="tool_choice"
            )
        return self


class TokenizeBody(_Body):
    """POST /tokenize: a text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
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


class AbortBody(_Body):
    """POST /abort_request."""

    rid: Rid | None = None
    abort_all: bool = False

    @model_validator(mode="after")
    def _someone(self) -> AbortBody:
        if self.rid is None and not self.abort_all:
            raise RequestError("name a rid, or say abort_all: true", param="rid")
        return self
