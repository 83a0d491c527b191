"""Shapes of responses for the OpenAPI document. Tests compare responses with them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from kvweave.prefix.lease import Tier

FinishReason = Literal["stop", "length", "abort", "tool_calls"]


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
    session_tokens: int
    """Of moved_tokens: from KV that this session computed behind moved text."""
    shared_tokens: int
    """Of moved_tokens: read in the donor's pages instead of copied."""
    cache_write_tokens: int


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
    shared: int
    """Tokens of it that are read in the donor's pages; the others were copied."""
    generation: int
    """0: from exact KV; else how often KV of the session was computed behind KV of its own."""
    answer: int | None = None
    """The choice it is of, where a prompt's answers were served differently."""


class UsedOrder(BaseModel):
    """The order in which the parts of a message were used."""

    message: int
    parts: list[int]
    cached_tokens: int
    cached_tokens_as_given: int


class MovedLines(BaseModel):
    """Which lines of the system text were moved behind it."""

    message: int | None
    lines: list[int]


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
    """A plain answer, or what one event of a stream adds to it."""

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


class CalledFunction(BaseModel):
    name: str
    arguments: str
    """JSON."""


class Call(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(BaseModel):
    role: Literal["assistant"]
    content: str | None
    """null in a message of calls alone."""
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[Call] = Field(default_factory=list)


class CalledFunctionPart(BaseModel):
    name: str | None = None
    """In the first part of a call."""
    arguments: str
    """The next fragment."""


class CallPart(BaseModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionPart


class MessagePart(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPart] = Field(default_factory=list)


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
    kvweave_volatile_head: MovedLines | None = None
    """With `move_volatile_head`."""


class ChatCompletionChunk(_Envelope):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageFacts | None = None
    kvweave_order: UsedOrder | None = None
    kvweave_volatile_head: MovedLines | None = None


class MessageUsage(BaseModel):
    """The first three add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    moved_tokens: int
    """Of those read from the cache."""
    paraphrase_tokens: int


class MessageAnswer(BaseModel):
    """Anthropic's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class GeneratedText(BaseModel):
    """SGLang's answer; an event of a stream holds all of it so far."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    index: int | None = None
    """Of the answer, in a stream of several."""


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of float32."""


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(BaseModel):
    """OpenAI's response, with the request's settings around the output."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "cancelled", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    previous_response_id: str | None
    store: bool
    usage: ResponseUsage | None


class InputItems(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None


class ResponseDeleted(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class NamedEvent(BaseModel):
    """An event of a stream whose events are named: its name is its type."""

    type: str


class CountedTokens(BaseModel):
    input_tokens: int


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
    kv_cache_dtype: str
    kv_cache_dtype_because: str
    number_types: str
    dtype_because: str


class ServerInfo(ModelInfo):
    """The model and every setting in force, by its name."""

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


class SessionClosed(BaseModel):
    success: Literal[True]
    tokens: int
    """How many tokens were kept for the session alone."""


class Aborted(BaseModel):
    success: Literal[True]
    aborted: int
    """Requests that were running under that name."""


REFERENCE = "#/components/schemas/{model}"


def answers(
    shape: Any, *refusals: int, event: type[BaseModel] | None = None
) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: 200 with `shape` or a stream of `event`, and its error statuses."""
    success: dict[str, Any] = {"model": shape, "description": "The answer."}
    if event is not None:
        success["content"] = {"text/event-stream": {"itemSchema": _event(event)}}
    return {200: success, **{status: {} for status in refusals}}


def reference(shape: type[BaseModel]) -> dict[str, str]:
    """To `shape` among the document's components."""
    return {"$ref": REFERENCE.format(model=shape.__name__)}


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """A server-sent event: a chunk or a failure as JSON, or [DONE] at the end."""
    some: dict[str, Any] = {"type": "string", "contentMediaType": "application/json"}
    some["contentSchema"] = {"anyOf": [reference(chunk), reference(ErrorAnswer)]}
    data = {"anyOf": [{"const": "[DONE]"}, some]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}
