"""POST /generate: SGLang's own protocol, which its router and clients speak."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, ValidationError, model_validator
from starlette.responses import Response

from kvweave.engine.types import Completion, SamplingParams, TokenLogprob
from kvweave.errors import RequestError
from kvweave.server import schemas
from kvweave.server.errors import body_of
from kvweave.server.fields import MAX_PROMPTS, Prompt, Whole
from kvweave.server.metrics import reuse_fields
from kvweave.server.protocol import ChatBody, CompletionBody, GenerationBody, RequestBody
from kvweave.server.responses import TokenTexts, finite
from kvweave.server.schemas import answers
from kvweave.server.service import Service
from kvweave.server.streaming import Batch, Generation, GenerationResponse

_NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
"""Sampling parameters by SGLang's names, and what completions call them."""
_THEIRS = {ours: name for name, ours in _NAMES.items()}
_NO_SAMPLING = RequestBody.model_fields.keys() | {"stream_options", "return_plan"}


class GenerateBody(RequestBody):
    """POST /generate."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = {}
    return_logprob: bool = False
    logprob_start_len: Whole = -1
    """The first prompt token whose log probability is wanted; -1: those of the answer only."""
    top_logprobs_num: Whole = Field(0, ge=0, le=SamplingParams.MAX_LOGPROBS)
    return_text_in_logprobs: bool = False

    DEFAULT_TOKENS: ClassVar[int] = 128

    @model_validator(mode="after")
    def _one_prompt_at_least(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("send either text or input_ids", param="text")
        if not 0 < len(self.prompts) <= MAX_PROMPTS:
            raise ValueError(f"1 to {MAX_PROMPTS} prompts, not {len(self.prompts)}")
        params = self.sampling_params
        if isinstance(params, list) and len(params) != len(self.prompts):
            raise RequestError(
                f"sampling_params are {len(params)} for {len(self.prompts)} prompts",
                param="sampling_params",
            )
        return self

    @property
    def single(self) -> bool:
        """Whether the prompt is no list of prompts."""
        ids = self.input_ids
        return isinstance(self.text, str) or bool(ids and isinstance(ids[0], int))

    @property
    def prompts(self) -> list[Prompt]:
        given: Any = self.input_ids if self.text is None else self.text
        every = [given] if self.single else given
        return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in every]

    @property
    def prompt_field(self) -> str:
        return "input_ids" if self.text is None else "text"

    def sampling(self) -> list[GenerationBody]:
        """The parameters of each prompt, as completions have them. RequestError."""
        given = self.sampling_params
        each = given if isinstance(given, list) else [given] * len(self.prompts)
        return [_checked(params) for params in each]


GenerateBody.ELSEWHERE = dict.fromkeys(
    (ChatBody.model_fields.keys() | CompletionBody.model_fields.keys())
    - GenerateBody.model_fields.keys(),
    "sampling_params, or /v1/completions",
)


def _checked(params: Mapping[str, Any]) -> GenerationBody:
    said = {_NAMES.get(name, name): value for name, value in params.items()}
    said = {name: value for name, value in said.items() if name not in _NO_SAMPLING}
    try:
        return GenerationBody.model_validate({"max_tokens": GenerateBody.DEFAULT_TOKENS, **said})
    except ValidationError as wrong:
        problem = wrong.errors()[0]
        name = str(problem["loc"][0]) if problem["loc"] else ""
        reason = problem.get("ctx", {}).get("error") or problem["msg"]
        raise RequestError(f"{_THEIRS.get(name, name)}: {reason}", param=_param(name)) from None
    except RequestError as wrong:
        wrong.param = _param(wrong.param or "")
        raise


def _param(name: str) -> str:
    return f"sampling_params.{_THEIRS.get(name, name)}"


_PARAMS = {name: _param(name) for name in GenerationBody.model_fields.keys() - _NO_SAMPLING}
"""Sampling parameters as refusals name them."""


def generate_router(service: Service) -> APIRouter:
    """POST /generate."""
    router = APIRouter()
    one = schemas.GeneratedText

    @router.post(
        "/generate",
        response_class=Response,
        responses=answers(one | list[one], 404, 429, event=one),  # type: ignore[valid-type]
    )
    async def generate(body: GenerateBody) -> Response:
        service.card.require(body.model)
        reader = service.reader
        scores = body.top_logprobs_num if body.return_logprob else None
        prompt_scores = scores if body.logprob_start_len >= 0 else None
        sampling = []
        for params in body.sampling():
            words = reader.spellings(params.bad_words)
            more = {"logprobs": scores, "prompt_logprobs": prompt_scores, "bad_words_ids": words}
            try:
                sampling.append(params.sampling(**service.sampling, **more))
            except RequestError as wrong:
                wrong.param = _param(wrong.param or "")
                raise
        field = body.prompt_field
        prompts = await asyncio.gather(
            *(reader.read(prompt, param=field) for prompt in body.prompts)
        )
        generation = service.generate(
            body, prompts, sampling, endpoint="generate", names={**_PARAMS, "prompt": field}
        )
        writer = _GenerateWriter(generation, body, service.texts)
        return GenerationResponse(generation, writer, stream=body.stream)

    return router


class _GenerateWriter:
    """Writes texts with `meta_info`; an event holds all of an answer so far."""

    named_events = False

    def __init__(self, generation: Generation, body: GenerateBody, texts: TokenTexts) -> None:
        self._body = body
        self._texts = texts
        self._requests = generation.requests
        self._metrics = generation.metrics
        self._answers = {
            (place, index): Completion()
            for place, request in enumerate(generation.requests)
            for index in range(request.sampling.n)
        }
        self._places = {key: number for number, key in enumerate(self._answers)}
        self._alone = body.single and len(self._answers) == 1

    def add(self, batch: Batch) -> Sequence[dict[str, Any]]:
        for place, delta in batch:
            self._answers[place, delta.index].extend(delta)
        if not self._body.stream:
            return ()
        return [self._event(place, delta.index) for place, delta in batch]

    def end(self) -> Any:
        if self._body.stream:
            return None
        for answer in self._answers.values():
            answer.finish_reason = answer.finish_reason or "abort"
        written = [self._written(place, index) for place, index in self._answers]
        return written[0] if self._alone else written

    def failed(self, failure: Exception) -> dict[str, Any]:
        return body_of(failure)

    def _event(self, place: int, index: int) -> dict[str, Any]:
        written = self._written(place, index)
        return written if self._alone else {**written, "index": self._places[place, index]}

    def _written(self, place: int, index: int) -> dict[str, Any]:
        answer, metrics = self._answers[place, index], self._metrics[place]
        facts = {
            "id": self._requests[place].rid,
            "finish_reason": _finish(answer),
            "prompt_tokens": metrics.usage.prompt_tokens,
            "completion_tokens": len(answer.token_ids),
            **reuse_fields(metrics.usage.reuse),
            "e2e_latency": metrics.total_seconds,
        }
        if self._body.return_logprob:
            facts |= self._scores(answer, self._answers[place, 0].prompt_logprobs or ())
        return {"text": answer.text, "output_ids": list(answer.token_ids), "meta_info": facts}

    def _scores(self, answer: Completion, prompt: Sequence[TokenLogprob]) -> dict[str, Any]:
        told = prompt[max(self._body.logprob_start_len, 0) :]
        found: dict[str, Any] = {}
        for side, scores in (("input", told), ("output", answer.logprobs)):
            found[f"{side}_token_logprobs"] = [
                self._score(score.token_id, score.logprob) for score in scores
            ]
            if self._body.top_logprobs_num:
                found[f"{side}_top_logprobs"] = [
                    [self._score(*other) for other in score.top] or None for score in scores
                ]
        return found

    def _score(self, token_id: int, logprob: float | None) -> list[Any]:
        text = self._texts.of(token_id)[0] if self._body.return_text_in_logprobs else None
        return [finite(logprob), token_id, text]


def _finish(answer: Completion) -> dict[str, Any] | None:
    match answer.finish_reason:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": answer.matched_stop}
        case "length":
            return {"type": "length", "length": len(answer.token_ids)}
    return {"type": "abort", "message": "the request was ended early"}
