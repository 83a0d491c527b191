"""Requests, their limits, and results of an engine, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from kvweave.errors import RequestError
from kvweave.prefix.lease import Reuse, Span

FinishReason = Literal["stop", "length", "abort", "error"]


GrammarKind = Literal["json_schema", "regex", "lark", "llguidance"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a whole answer must match. Equal specs share one compiled grammar."""

    kind: GrammarKind
    text: str
    """A JSON schema as JSON, a regular expression, or a grammar in one of llguidance's forms."""
    param: str = field(default="response_format", compare=False)
    """The request's field that it comes from, for refusals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Names and ranges are OpenAI's, and vLLM's where OpenAI has none.

    `temperature` 0 is greedy. `top_k` 0 or -1 is off. `max_tokens` None runs to the context's end.
    `logprobs` is the number of alternatives per generated token (None: no logprobs at all);
    `prompt_logprobs` the same for the prompt (which then is computed in full, whatever is cached).
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these are ever chosen."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that no answer holds: the last one is impossible after the others."""
    grammar: GrammarSpec | None = None
    """Answers match it, except those that `max_tokens` or a stop of the client's cuts off."""

    MAX_LOGPROBS = 20
    MAX_N = 128

    def validate(self) -> None:
        """Raise RequestError naming the first field that is out of range."""
        for name, low, high in RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # as no NaN is
                raise RequestError(
                    f"{name} must be between {low:,} and {high:,}, not {value}", param=name
                )
        if self.top_p == 0:
            raise RequestError("top_p must be above 0", param="top_p")
        if any(not text for text in self.stop):
            raise RequestError("stop strings must not be empty", param="stop")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids must name a token, or be left out", param="allowed_token_ids"
            )
        if not all(self.bad_words_ids):
            raise RequestError("bad words must have tokens", param="bad_words")
        for token, bias in (self.logit_bias or {}).items():
            if token < 0 or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias maps token ids to numbers from -100 to 100, not {token}: {bias}",
                    param="logit_bias",
                )


RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 0, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", -1, 2**31 - 1),
    ("min_p", 0, 1),
    ("seed", -(2**63), 2**63 - 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0.01, 100),
    ("n", 1, SamplingParams.MAX_N),
    ("logprobs", 0, SamplingParams.MAX_LOGPROBS),
    ("prompt_logprobs", 0, SamplingParams.MAX_LOGPROBS),
)
"""Of numbers, by name: the least and the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt, already tokenised, and what is wanted for it (`sampling.n` answers)."""

    rid: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    """Larger runs earlier and is preempted later."""
    cache_salt: str | None = None
    fuzzy: bool = True
    """False: this answer must not depend on anything approximate."""
    protected_from: int | None = None
    """Where the last question begins, in tokens: from there on no paraphrase is served.
    None: unknown, and assumed to be long."""
    fuzzy_refresh: float | None = None
    """Share of moved tokens that is computed again; None: as the engine is configured."""
    fuzzy_semantic: bool = True
    """False: this prompt is served no paraphrases and lends none; it is not embedded."""
    session: str | None = None
    """Requests of one session may lend each other KV that is not exact."""
    retain_seconds: float = 0.0
    """For how long the cache prefers to evict KV of others, within its bound."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine. They are constant, so any thread may check a request."""

    context_length: int
    pool_tokens: int
    vocab_size: int

    def check(self, request: GenerateRequest) -> None:
        """Raise RequestError if the request could not be served, even alone."""
        sampling = request.sampling
        sampling.validate()
        if request.fuzzy_refresh is not None and not 0 <= request.fuzzy_refresh <= 1:
            raise RequestError(
                f"fuzzy_refresh is a share from 0 to 1, not {request.fuzzy_refresh}",
                param="fuzzy_refresh",
            )
        self._check_length(len(request.prompt_ids), sampling.max_tokens)
        self._check_tokens(request.prompt_ids, "prompt")
        self._check_tokens(sampling.stop_token_ids, "stop_token_ids")
        self._check_tokens(sampling.logit_bias or (), "logit_bias")
        self._check_tokens(sampling.allowed_token_ids or (), "allowed_token_ids")
        self._check_tokens(chain.from_iterable(sampling.bad_words_ids), "bad_words")

    @property
    def _room(self) -> int:
        """Most tokens of prompt and answer.

        The pool counts one token more than it holds: the KV of the last token is never read.
        """
        return min(self.context_length, self.pool_tokens + 1)

    @property
    def _why_less(self) -> str:
        if self.pool_tokens >= self.context_length:
            return ""
        return f", whose KV pool holds {self.pool_tokens} (--max-total-tokens)"

    def longest(self, request: GenerateRequest) -> int:
        """The length, prompt included, at which an answer ends."""
        wanted = request.sampling.max_tokens
        return self._room if wanted is None else len(request.prompt_ids) + wanted

    def _check_length(self, prompt: int, max_tokens: int | None) -> None:
        if not prompt:
            raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
        most = self.context_length if max_tokens == 0 else self.context_length - 1
        if prompt > most:
            raise RequestError(
                f"This model's maximum context length is {self.context_length} tokens, the answer "
                f"included. However, the prompt has {prompt} tokens: it may have {most}",
                param="prompt",
                code="context_length_exceeded",
            )
        if prompt > self.pool_tokens:
            raise RequestError(
                f"This model's maximum context length is {self.pool_tokens} tokens on this server"
                f"{self._why_less}. However, the prompt has {prompt} tokens",
                param="prompt",
                code="context_length_exceeded",
            )
        if max_tokens is not None and prompt + max_tokens > self._room:
            raise RequestError(
                f"This model's maximum context length is {self._room} tokens on this server"
                f"{self._why_less}. "
                f"However, you requested {prompt + max_tokens} tokens ({prompt} in the prompt, "
                f"{max_tokens} for the answer): ask for at most {self._room - prompt}, or leave "
                "max_tokens out",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _check_tokens(self, token_ids: Iterable[int], param: str) -> None:
        token_ids = tuple(token_ids)
        low, high = min(token_ids, default=0), max(token_ids, default=0)
        if low < 0 or high >= self.vocab_size:
            raise RequestError(
                f"{param} has the token id {low if low < 0 else high}, but this model's go from 0 "
                f"to {self.vocab_size - 1}",
                param=param,
            )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log probability (natural logarithm) and the likeliest alternatives, best first.

    `logprob` is None for a prompt's first token, which nothing predicts.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Where a prompt's KV came from, in tokens. Counted when the request was first admitted."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reuse: Reuse = field(default_factory=Reuse)
    """Its exact part is at most prompt_tokens - 1."""
    cache_write_tokens: int = 0
    """Computed, and in the cache by the first token: exact for later requests, in whole pages."""

    # The names that clients know:

    @property
    def cached_tokens(self) -> int:
        """Exact reuse only."""
        return self.reuse.exact

    @property
    def moved_tokens(self) -> int:
        return self.reuse.moved

    @property
    def paraphrase_tokens(self) -> int:
        """Served from KV of a paraphrase."""
        return self.reuse.paraphrase

    @property
    def refreshed_tokens(self) -> int:
        return self.reuse.recomputed


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one step added to answer `index` of request `rid`.

    `text` never holds half a character. The last delta of an answer carries `finish_reason`; the
    `matched_stop` is the stop string or token id that ended it. `error` goes with finish "error".
    """

    rid: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Once, in the first delta of answer 0, when asked for."""
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    error: str | None = None
    plan: tuple[Span, ...] = ()
    """Spans that served this prompt beyond its exact prefix; in every answer's first delta."""
    refreshed: tuple[tuple[int, int], ...] = ()
    """Runs (start, length) inside those spans that were computed again."""


@dataclass(slots=True)
class Completion:
    """A whole answer: what `LLM.generate` returns per prompt and sample."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    error: str | None = None
    usage: Usage = field(default_factory=Usage)
    plan: tuple[Span, ...] = ()
    refreshed: tuple[tuple[int, int], ...] = ()
    first_token_seconds: float | None = None
    """From submission to the first token."""

    def extend(self, delta: OutputDelta) -> None:
        """Add what a step made known of this answer."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = list(delta.prompt_logprobs)
        self.finish_reason = delta.finish_reason
        self.matched_stop = delta.matched_stop
        self.error = delta.error
        self.usage = delta.usage
        self.plan = delta.plan or self.plan
        self.refreshed = delta.refreshed or self.refreshed


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """An engine's gauges at one moment, and its counters since start."""

    running: int = 0
    """Answers that hold pages."""
    waiting: int = 0
    """Answers that wait for their first step, or to be resumed."""
    total_tokens: int = 0
    """Slots in the pool; the next four count slots too."""
    free_tokens: int = 0
    used_tokens: int = 0
    """In pages that a running request owns, or that the cache keeps and cannot evict now."""
    cached_tokens: int = 0
    """In pages that the cache keeps, used or not."""
    evictable_tokens: int = 0

    requests: int = 0
    """Requests accepted."""
    finished: int = 0
    """Answers that ended by themselves: by a stop or by length."""
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    """Of requests that were admitted, each once; `hit_tokens` are among them."""
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens that were served instead of computed, by tier."""
    prefill_tokens: int = 0
    """Prompt tokens computed, those that a preemption made necessary again included."""
    generated_tokens: int = 0
    preemptions: int = 0
    evicted_tokens: int = 0
    steps: int = 0
    prefill_steps: int = 0
    """Steps that computed prompt tokens, alone or beside decodes."""
    drafted_tokens: int = 0
    """Proposed by drafts; `accepted_tokens` of them became part of answers."""
    accepted_tokens: int = 0
    dropped_event_batches: int = 0
    """Batches of cache events dropped because they came faster than they were sent."""

    paraphrase_refused: Mapping[str, int] = field(default_factory=dict)
    """Proposed paraphrases that were not served, by reason."""
    provider_events: Mapping[str, int] = field(default_factory=dict)
    """Calls of the provider of reuse beyond the prefix, by how they ended, and its proposals."""
    provider_figures: Mapping[str, float] = field(default_factory=dict)
    """The provider's own statistics."""

    heals_waiting: int = 0
    """Prompts that were served approximately and wait to be computed exactly."""
    healed: int = 0
    """Prompts that were computed exactly."""
    healed_tokens: int = 0
    """Prompt tokens computed by healing; no other counter counts them."""
    heals_preempted: int = 0
    """Times that a request interrupted healing."""
    heals_dropped: int = 0
    """Prompts given up: too many waited, no room beside KV in use or of higher rank, a fault."""

    store_figures: Mapping[str, float] = field(default_factory=dict)
    """Of the store of KV on disk, by name; empty without one."""
