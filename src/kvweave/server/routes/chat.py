"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvweave.engine.types import Completion, OutputDelta, TokenLogprob
from kvweave.server.chat import start_chat
from kvweave.server.protocol import ChatBody
from kvweave.server.responses import TokenTexts, scored_tokens
from kvweave.server.schemas import ChatCompletion, ChatCompletionChunk, answers
from kvweave.server.service import Service


def chat_router(service: Service) -> APIRouter:
    """The route, bound to `service`."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        response_class=Response,
        responses=answers(ChatCompletion, 404, 429, event=ChatCompletionChunk),
    )
    async def create_chat_completion(body: ChatBody) -> Response:
        chat = await start_chat(service, body)
        form = _ChatFormat(service.texts, scored=bool(body.logprobs))
        return service.respond(chat.generation, body, form, id_prefix="chatcmpl-", notes=chat.notes)

    return router


class _ChatFormat:
    """Writes choices as messages of the assistant."""

    whole, chunk = "chat.completion", "chat.completion.chunk"

    def __init__(self, texts: TokenTexts, *, scored: bool) -> None:
        self._texts = texts
        self._scored = scored
        self._begun: set[int] = set()

    def choice(self, place: int, answer: Completion) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
            "matched_stop": answer.matched_stop,
        }

    def pieces(self, place: int, delta: OutputDelta) -> Iterable[tuple[int, dict[str, Any]]]:
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            yield delta.index, self._piece({"role": "assistant", "content": "", "refusal": None})
        if delta.text or delta.logprobs:
            yield delta.index, self._piece({"content": delta.text}, self._logprobs(delta.logprobs))
        if delta.finish_reason is not None:
            end = {"finish_reason": delta.finish_reason, "matched_stop": delta.matched_stop}
            yield delta.index, {**self._piece({}), **end}

    def _piece(self, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        return {"delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, scores: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._scored:
            return None
        return {"content": scored_tokens(self._texts, scores), "refusal": None}
