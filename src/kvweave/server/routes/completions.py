"""POST /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvweave.engine.types import Completion, OutputDelta, TokenLogprob
from kvweave.server import schemas
from kvweave.server.protocol import CompletionBody, DetokenizeBody, TokenizeBody
from kvweave.server.responses import TokenTexts, finite
from kvweave.server.schemas import Text, Tokens, answers
from kvweave.server.service import Service


def completions_router(service: Service) -> APIRouter:
    """The route, bound to `service`."""
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
        generation = service.generation(
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
