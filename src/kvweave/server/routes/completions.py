"""POST /v1/completions, /v1/chat/completions and /v1/embeddings, and /tokenize and /detokenize.

Embeddings come from the sentence embedder that the semantic provider uses. The served model's own
states are none: it was trained to predict tokens, not to put texts of one meaning near each other.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import model_validator
from starlette.responses import Response

from kvweave.engine.types import Completion, OutputDelta, TokenLogprob
from kvweave.errors import RequestError
from kvweave.paraphrase.embedders import TextEmbedder, Vectors
from kvweave.server import schemas
from kvweave.server.fields import Prompts, Whole
from kvweave.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    RequestBody,
    TokenizeBody,
)
from kvweave.server.responses import TokenTexts, finite, scored_tokens
from kvweave.server.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    Embeddings,
    Text,
    Tokens,
    answers,
)
from kvweave.server.service import Service, start_chat
from kvweave.server.tools import (
    AnswerParser,
    AnswerPart,
    AnswerPlan,
    ReasoningPart,
    TextPart,
    parse,
)


def completions_router(service: Service) -> APIRouter:
    """POST /v1/completions: prompts continued as they stand, without a chat template."""
    router = APIRouter()

    @router.post(
        "/v1/completions",
        response_class=Response,
        responses=answers(schemas.Completion, 404, 429, event=schemas.Completion),
    )
    async def create_completion(body: CompletionBody) -> Response:
        service.card.require(body.model)
        reader = service.reader
        sampling = body.sampling(
            **service.sampling,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            bad_words_ids=reader.spellings(body.bad_words),
        )
        special = body.add_special_tokens is not False
        prompts = await asyncio.gather(
            *(reader.read(prompt, add_special_tokens=special) for prompt in body.prompt)
        )
        texts = [
            prompt if isinstance(prompt, str) else await reader.decode(prompt)
            for prompt in (body.prompt if body.echo else ())
        ]
        form = _CompletionFormat(body, prompts, texts, service.texts)
        generation = service.generate(
            body,
            prompts,
            [sampling] * len(prompts),
            endpoint="completions",
        )
        return service.respond(generation, body, form, id_prefix="cmpl-")

    return router


class _CompletionFormat:
    """Writes text choices, with the prompt before them if the client wants an echo."""

    whole = chunk = "text_completion"

    def __init__(
        self,
        body: CompletionBody,
        prompts: Sequence[tuple[int, ...]],
        echoes: Sequence[str],
        texts: TokenTexts,
    ) -> None:
        self._scores = body.logprobs is not None
        self._shows_special = not body.skip_special_tokens
        self._prompts = prompts
        self._echoes = echoes
        self._texts = texts
        self._offsets: dict[tuple[int, int], int] = {}
        # For streams with echo: scores of the prompts, and deltas held until they are known.
        self._prompt_scores: dict[int, tuple[TokenLogprob, ...]] = {}
        self._held: dict[int, list[OutputDelta]] = {}

    def choice(self, place: int, answer: Completion) -> dict[str, Any]:
        text, scores = answer.text, [*answer.logprobs]
        if self._echoes:
            text = self._echoes[place] + text
            scores = [*(answer.prompt_logprobs or ()), *scores]
        logprobs, _ = self._logprobs(scores, 0)
        return _choice(text, logprobs, answer)

    def pieces(self, place: int, delta: OutputDelta) -> Iterable[tuple[int, dict[str, Any]]]:
        if self._echoes and self._scores and place not in self._prompt_scores:
            if delta.prompt_logprobs is None:
                self._held.setdefault(place, []).append(delta)
                return
            self._prompt_scores[place] = delta.prompt_logprobs
        for one in (delta, *self._held.pop(place, ())):
            yield one.index, self._piece(place, one)

    def _piece(self, place: int, delta: OutputDelta) -> dict[str, Any]:
        text, scores = delta.text, delta.logprobs
        key = (place, delta.index)
        if self._echoes and key not in self._offsets:
            text = self._echoes[place] + text
            scores = self._prompt_scores.get(place, ()) + scores
        logprobs, self._offsets[key] = self._logprobs(scores, self._offsets.get(key, 0))
        return _choice(text, logprobs, delta)

    def _logprobs(
        self, scores: Sequence[TokenLogprob], offset: int
    ) -> tuple[dict[str, Any] | None, int]:
        """OpenAI's four parallel lists, and the offset in the text where the next token begins."""
        if not self._scores:
            return None, offset
        tokens, values, tops, offsets = [], [], [], []
        for score in scores:
            name, _ = self._texts.of(score.token_id)
            tokens.append(name)
            values.append(finite(score.logprob))
            tops.append(None if score.logprob is None else self._top(name, score))
            offsets.append(offset)
            offset += self._texts.width(score.token_id, self._shows_special)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }, offset

    def _top(self, name: str, score: TokenLogprob) -> dict[str, float | None]:
        top: dict[str, float | None] = {}
        for token_id, value in score.top:
            # Two tokens may have the same text: the likelier one comes first and is kept.
            top.setdefault(self._texts.of(token_id)[0], finite(value))
        top.setdefault(name, finite(score.logprob))
        return top


def _choice(text: str, logprobs: Any, end: Completion | OutputDelta) -> dict[str, Any]:
    return {
        "text": text,
        "logprobs": logprobs,
        "finish_reason": end.finish_reason,
        "matched_stop": end.matched_stop,
    }


def tokenization_router(service: Service) -> APIRouter:
    """The two routes, bound to `service`."""
    router = APIRouter()
    card, reader, texts = service.card, service.reader, service.texts

    @router.post("/tokenize", response_model=None, responses=answers(Tokens, 404))
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        card.require(body.model)
        if body.prompt is None:
            ids = (await reader.conversation(body.conversation())).ids
        else:
            special = body.add_special_tokens is not False
            ids = await reader.read(body.prompt, add_special_tokens=special)
        answer = {"count": len(ids), "max_model_len": card.context_length, "tokens": list(ids)}
        if body.return_token_strs:
            answer["token_strs"] = [texts.of(token)[0] for token in ids]
        return answer

    @router.post("/detokenize", response_model=None, responses=answers(Text, 404))
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        card.require(body.model)
        ids = reader.known(body.tokens, param="tokens")
        text = await reader.decode(ids, skip_special_tokens=body.skip_special_tokens)
        # vLLM's name and SGLang's.
        return {"prompt": text, "text": text}

    return router


def chat_router(service: Service) -> APIRouter:
    """POST /v1/chat/completions."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        response_class=Response,
        responses=answers(ChatCompletion, 404, 429, event=ChatCompletionChunk),
    )
    async def create_chat_completion(body: ChatBody) -> Response:
        generation, chat = await start_chat(service, body)
        form = _ChatFormat(
            service.texts,
            chat.plan,
            scored=bool(body.logprobs),
            reasons=body.include_reasoning,
            may_call=bool(body.tools),
        )
        return service.respond(generation, body, form, id_prefix="chatcmpl-", notes=chat.notes)

    return router


class _ChatFormat:
    """Writes choices as messages of the assistant."""

    whole, chunk = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        texts: TokenTexts,
        plan: AnswerPlan,
        *,
        scored: bool,
        reasons: bool = True,
        may_call: bool = False,
    ) -> None:
        """`reasons`: reasoning is shown, apart from the content; `may_call`: there are tools."""
        self._texts = texts
        self._make_parser = plan.make_parser
        self._scored = scored
        self._reasons = reasons
        self._may_call = may_call
        self._parsers: dict[int, AnswerParser] = {}
        self._calling: set[int] = set()
        """Answers that hold a call."""

    def choice(self, place: int, answer: Completion) -> dict[str, Any]:
        parsed = parse(self._make_parser(), answer.text)
        # As OpenAI writes it, a message of calls alone has no content.
        content = None if parsed.calls and not parsed.text else parsed.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if parsed.reasoning and self._reasons:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in parsed.calls
            ]
        return {
            "message": message,
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": _finish(answer.finish_reason, bool(parsed.calls)),
            "matched_stop": answer.matched_stop,
        }

    def pieces(self, place: int, delta: OutputDelta) -> Iterable[tuple[int, dict[str, Any]]]:
        index, parser = delta.index, self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[index] = self._make_parser()
            # A message of calls alone has no content, and what follows is not known yet.
            content = None if self._may_call else ""
            yield index, self._piece({"role": "assistant", "content": content, "refusal": None})
        parts = parser.feed(delta.text)
        if delta.finish_reason is not None:
            parts += parser.finish()
        shown = [each for part in parts if (each := self._shown(part, index)) is not None]
        if delta.logprobs and not shown:
            shown.append({"content": ""})
        for at, each in enumerate(shown):
            # Log probabilities are those of the tokens, whatever text is still held back.
            yield index, self._piece(each, self._logprobs(delta.logprobs) if at == 0 else None)
        if delta.finish_reason is not None:
            reason = _finish(delta.finish_reason, index in self._calling)
            end = {"finish_reason": reason, "matched_stop": delta.matched_stop}
            text = {"content": ""} if self._may_call and index not in self._calling else {}
            yield index, {**self._piece(text), **end}

    def _shown(self, part: AnswerPart, index: int) -> dict[str, Any] | None:
        """A part as a stream's `delta`."""
        if isinstance(part, TextPart):
            return {"content": part.text}
        if isinstance(part, ReasoningPart):
            return {"reasoning_content": part.text} if self._reasons else None
        self._calling.add(index)
        call: dict[str, Any] = {"index": part.index, "function": {"arguments": part.arguments}}
        if part.name is not None:
            call |= {"id": part.id, "type": "function"}
            call["function"] = {"name": part.name, "arguments": part.arguments}
        return {"tool_calls": [call]}

    def _piece(self, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        return {"delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, scores: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._scored:
            return None
        return {"content": scored_tokens(self._texts, scores), "refusal": None}


def _finish(reason: str | None, calls: bool) -> str | None:
    return "tool_calls" if calls and reason == "stop" else reason


class EmbeddingsBody(RequestBody):
    """POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Whole | None = None

    @model_validator(mode="after")
    def _no_stream(self) -> EmbeddingsBody:
        if self.stream:
            raise RequestError("embeddings are not streamed", param="stream")
        return self


def embeddings_router(service: Service, embedder: str) -> APIRouter:
    """The route, bound to `service`; `embedder` is a name of the registry."""
    router = APIRouter()
    model = TextEmbedder(embedder)

    @router.post("/v1/embeddings", response_model=None, responses=answers(Embeddings, 404, 501))
    async def create_embeddings(body: EmbeddingsBody) -> dict[str, Any]:
        if body.model != embedder:
            service.card.require(body.model)
        prompts = await asyncio.gather(
            *(service.reader.read(each, param="input") for each in body.input)
        )
        texts = [
            text if isinstance(text, str) else await service.reader.decode(text)
            for text in body.input
        ]
        vectors = await asyncio.to_thread(model.embed, texts)
        if body.dimensions not in (None, vectors.shape[1]):
            raise RequestError(
                f"{embedder} has {vectors.shape[1]} dimensions, which cannot be cut",
                param="dimensions",
            )
        tokens = sum(map(len, prompts))
        return {
            "object": "list",
            "model": embedder,
            "data": [
                {"object": "embedding", "index": at, "embedding": _written(vector, body)}
                for at, vector in enumerate(vectors)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    return router


def _written(vector: Vectors, body: EmbeddingsBody) -> Any:
    """A vector as numbers, or as the base64 of its float32 in little-endian order."""
    if body.encoding_format == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode()
