"""What the server answers, as OpenAPI describes it: for the document only, nothing is built of it.

The tests hold every answer against it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from kvweave.prefix.plan import Tier

FinishReason = Literal["stop", "length", "abort"]


class ErrorFacts(BaseModel):
    message: str
    type: str
    param: str | None
    """The field as the client wrote it."""
    code: str | None


class ErrorAnswer(BaseModel):
    """Every failure."""

    error: ErrorFacts


class PromptDetails(BaseModel):
    cached_tokens: int
    moved_tokens: int
    paraphrase_tokens: int
    refreshed_tokens: int


class UsageFacts(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class PlanSpan(BaseModel):
    """Where a run of a prompt's KV came from."""

    prompt: int
    start: int
    length: int
    tier: Tier
    donor: str | None
    donor_start: int


class UsedOrder(BaseModel):
    """In which order the parts of a message were used."""

    message: int
    parts: list[int]
    cached_tokens: int
    cached_tokens_as_given: int


class _Envelope(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: None
    kvweave_plan: list[PlanSpan] = Field(default_factory=list)
    """With `return_plan`."""


class _Choice(BaseModel):
    index: int
    finish_reason: FinishReason | None
    """null in a stream's events, until the last."""
    matched_stop: str | int | None = None


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class TextChoice(_Choice):
    text: str
    logprobs: TextLogprobs | None


class Completion(_Envelope):
    """A plain answer; as an event of a stream, what was added."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: UsageFacts | None = None


class ScoredToken(BaseModel):
    token: str
    logprob: float | None
    bytes: list[int]


class ScoredPlace(ScoredToken):
    top_logprobs: list[ScoredToken]


class ChatLogprobs(BaseModel):
    content: list[ScoredPlace]
    refusal: None


class Message(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class MessagePart(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class ChatChoice(_Choice):
    message: Message
    logprobs: ChatLogprobs | None


class ChatChunkChoice(_Choice):
    delta: MessagePart
    logprobs: ChatLogprobs | None


class ChatCompletion(_Envelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageFacts
    kvweave_order: UsedOrder | None = None
    """With `reorder`."""


class ChatCompletionChunk(_Envelope):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageFacts | None = None
    kvweave_order: UsedOrder | None = None


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """The same text under two names: vLLM's and SGLang's."""

    prompt: str
    text: str


class ModelFacts(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelFacts]


class ModelInfo(BaseModel):
    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool
    model_type: str | None
    architectures: list[str]
    max_model_len: int
    vocab_size: int


class ServerInfo(ModelInfo):
    """And every setting that is in force, by its name."""

    version: str
    versions: dict[str, str]
    started: int
    max_total_tokens: int
    dp_size: int
    live_requests: int
    fuzzy_self_check_result: dict[str, Any] | None
    kv_events: dict[str, Any] | None
    engine: dict[str, Any]


class Load(BaseModel):
    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class Health(BaseModel):
    status: Literal["ok"]


class Flushed(BaseModel):
    success: Literal[True]
    message: str


class Aborted(BaseModel):
    success: Literal[True]
    aborted: int
    """How many requests were running under that name."""
