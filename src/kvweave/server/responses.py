"""Writes answers as OpenAI's objects and stream events, and keeps those of /v1/responses.

A token may be half a character; its bytes are exact, and its text then reads `bytes:\\xe2\\x82` as
in OpenAI's completions, which keeps two such tokens apart as keys.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from kvweave.engine.types import Completion, OutputDelta, TokenLogprob
from kvweave.errors import RequestError
from kvweave.prefix.lease import Span, Tier
from kvweave.server.errors import body_of
from kvweave.server.metrics import RequestMetrics, usage_body
from kvweave.server.protocol import GenerationBody
from kvweave.server.streaming import Batch

_SPIECE_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Bytes by the printable characters that byte-level BPE writes for them (GPT-2's encoder.py).

    Printable bytes stand for themselves; the others are numbered from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


class TokenTexts:
    """Text and bytes per token id, cached. `tokenizer` is a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._alphabet = _byte_level_alphabet() if _is_byte_level(tokenizer) else None
        self.of = lru_cache(maxsize=65536)(self._of)
        """of(token_id) -> (text, its bytes)."""

    def width(self, token_id: int, shows_special: bool) -> int:
        """Characters that begin in this token: the distance to the next token's text."""
        if token_id in self._special and not shows_special:
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self.of(token_id)[1])

    def _of(self, token_id: int) -> tuple[str, bytes]:
        raw = self._bytes(token_id)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # the vocabulary is smaller than the model's output
            return b""
        if token_id in self._special:
            return str(token).encode()
        if self._alphabet is not None:
            if all(letter in self._alphabet for letter in token):
                return bytes(self._alphabet[letter] for letter in token)
            return str(token).encode()  # an added token, written as it is
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return str(token).replace(_SPIECE_SPACE, " ").encode()


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether the vocabulary uses GPT-2's spelling of bytes, in which a space is 'Ġ'."""
    vocabulary = tokenizer.get_vocab()
    return "\u0120" in vocabulary and _SPIECE_SPACE not in vocabulary


def finite(logprob: float | None) -> float | None:
    """A log probability that JSON can hold: minus infinity becomes -9999, as elsewhere."""
    return None if logprob is None else max(logprob, -9999.0)


def scored_tokens(texts: TokenTexts, scores: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Tokens with their log probabilities and alternatives, as chats and Responses show them."""

    def shown(token_id: int, logprob: float | None) -> dict[str, Any]:
        text, raw = texts.of(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}

    return [
        {
            **shown(score.token_id, score.logprob),
            "top_logprobs": [shown(*alternative) for alternative in score.top],
        }
        for score in scores
    ]


class Format(Protocol):
    """How an endpoint writes choices. `place` is the prompt's index in the request."""

    whole: str
    chunk: str
    """The `object` of a plain answer and of a stream's events."""

    def choice(self, place: int, answer: Completion) -> dict[str, Any]:
        """A whole answer, without its `index`."""
        ...

    def pieces(self, place: int, delta: OutputDelta) -> Iterable[tuple[int, dict[str, Any]]]:
        """A delta as choices of a stream: (index of the answer, choice without its `index`)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The fields of a response around its choices."""

    id: str
    model: str
    body: GenerationBody
    metrics: Sequence[RequestMetrics]
    notes: Mapping[str, Any]
    """Fields that say how the prompt was changed."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def answers(self) -> int:
        """Answers per prompt."""
        return self.body.n or 1

    def around(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An object of OpenAI's `kind` with these choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }

    def plan(self, place: int, delta: OutputDelta) -> list[dict[str, Any]]:
        """Where the KV of a prompt came from, as spans; tokens outside all spans were computed."""
        # Usage is that of the first admission, the spans are those of the latest.
        cached = min([delta.usage.cached_tokens, *(span.start for span in delta.plan)])
        exact = Span(0, cached, 0, 0, Tier.EXACT, shared=cached)
        spans = [{**asdict(exact), "donor": None}] if cached else []
        for span in delta.plan:
            donor = f"s{span.donor}" if span.generation else str(span.donor)
            spans.append({**asdict(span), "donor": donor})
        return [{"prompt": place, **span} for span in spans]


class _Plans:
    """Tells each prompt's plan once, and again for every answer that was served otherwise."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._first: dict[int, tuple[Span, ...]] = {}
        self._seen: set[tuple[int, int]] = set()

    def news(self, place: int, delta: OutputDelta) -> list[dict[str, Any]] | None:
        """The spans to send with this delta; `answer` names the choice where plans differ."""
        if (place, delta.index) in self._seen:
            return None
        self._seen.add((place, delta.index))
        if place not in self._first:
            self._first[place] = delta.plan
            return self._envelope.plan(place, delta)
        if delta.plan == self._first[place]:
            return None
        return [{**span, "answer": delta.index} for span in self._envelope.plan(place, delta)]


class _OpenAIWriter:
    named_events = False

    def failed(self, failure: Exception) -> dict[str, Any]:
        return body_of(failure)


class PlainWriter(_OpenAIWriter):
    """Collects all deltas and writes them as one object."""

    def __init__(self, envelope: Envelope, form: Format) -> None:
        self._envelope = envelope
        self._form = form
        self._answers: dict[tuple[int, int], Completion] = {}
        self._plans = _Plans(envelope)
        self._spans: list[tuple[int, int, list[dict[str, Any]]]] = []

    def add(self, batch: Batch) -> Iterable[dict[str, Any]]:
        """Collect; there is nothing to send yet."""
        for place, delta in batch:
            self._answer(place, delta.index).extend(delta)
            if (plan := self._plans.news(place, delta)) is not None:
                self._spans.append((place, delta.index, plan))
        return ()

    def end(self) -> dict[str, Any]:
        """The answer, with all choices in order."""
        envelope = self._envelope
        for place in range(len(envelope.metrics)):
            first = self._answer(place, 0).prompt_logprobs
            for index in range(1, envelope.answers):
                self._answer(place, index).prompt_logprobs = first
        choices = [
            {"index": number, **self._form.choice(place, self._answers[place, index])}
            for number, (place, index) in enumerate(sorted(self._answers))
        ]
        answer = envelope.around(self._form.whole, choices)
        answer["usage"] = usage_body(envelope.metrics)
        answer |= envelope.notes
        if envelope.body.return_plan:
            in_order = sorted(self._spans, key=lambda each: each[:2])
            answer["kvweave_plan"] = [span for *_, spans in in_order for span in spans]
        return answer

    def _answer(self, place: int, index: int) -> Completion:
        # An answer without a delta was aborted before its first token.
        return self._answers.setdefault((place, index), Completion(finish_reason="abort"))


class StreamWriter(_OpenAIWriter):
    """Writes every delta as an event."""

    def __init__(self, envelope: Envelope, form: Format) -> None:
        self._envelope = envelope
        self._form = form
        self._plans = _Plans(envelope)
        self._notes = envelope.notes
        options = envelope.body.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats

    def add(self, batch: Batch) -> Iterable[dict[str, Any]]:
        """One event per choice that got longer."""
        envelope = self._envelope
        for place, delta in batch:
            plan = self._plans.news(place, delta) if envelope.body.return_plan else None
            for index, choice in self._form.pieces(place, delta):
                number = place * envelope.answers + index
                event = envelope.around(self._form.chunk, [{"index": number, **choice}])
                if self._usage_always:
                    event["usage"] = usage_body(envelope.metrics)
                elif self._usage_at_end:
                    event["usage"] = None
                if plan is not None:
                    event["kvweave_plan"] = plan
                    plan = None
                event |= self._notes  # in the first one
                self._notes = {}
                yield event

    def end(self) -> dict[str, Any] | None:
        """The event with the usage of the whole request, if the client wants it."""
        if not self._usage_at_end:
            return None
        event = self._envelope.around(self._form.chunk, [])
        event["usage"] = usage_body(self._envelope.metrics)
        return event


MAX_BYTES = 256 * 2**20
"""Of all stored answers together, each counted with the conversation before it."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer and the conversation up to its end, as the messages of a chat."""

    response: dict[str, Any]
    items: Sequence[dict[str, Any]]
    """The request's own input items."""
    turns: Sequence[dict[str, Any]]
    """All turns so far without instructions, which only hold for one request."""
    cache_salt: str | None
    size: int


class ResponseStore:
    """At most `most` answers; the least recently used are forgotten first.

    An answer is found under the cache_salt of its request only.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_id: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def add(
        self,
        response: dict[str, Any],
        items: Sequence[dict[str, Any]],
        turns: Sequence[dict[str, Any]],
        cache_salt: str | None,
    ) -> None:
        """Keep an answer; it may already be too large to be kept."""
        size = len(json.dumps([response, items, turns]))
        self._by_id[response["id"]] = StoredResponse(response, items, turns, cache_salt, size)
        self._bytes += size
        while self._by_id and (len(self._by_id) > self._most or self._bytes > MAX_BYTES):
            self._forget(next(iter(self._by_id)))

    def find(self, name: str, cache_salt: str | None, param: str | None = None) -> StoredResponse:
        """RequestError (404) if it was not stored, is forgotten, or has another salt."""
        found = self._by_id.get(name)
        if found is None or found.cache_salt != cache_salt:
            raise RequestError(
                f"there is no stored response {name[:80]!r} under this cache_salt: this server "
                f"keeps the latest {self._most} (--max-stored-responses), and none with "
                "store: false",
                param=param,
                status=404,
                code="response_not_found",
            )
        self._by_id.move_to_end(name)
        return found

    def delete(self, name: str, cache_salt: str | None) -> None:
        """Forget it; answers that continue it stay. RequestError as in `find`."""
        self.find(name, cache_salt)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._bytes -= self._by_id.pop(name).size
