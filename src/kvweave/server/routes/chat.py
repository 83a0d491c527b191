"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvweave.engine.types import Completion, OutputDelta, TokenLogprob
from kvweave.server.protocol import ChatBody
from kvweave.server.responses import TokenTexts, scored_tokens
from kvweave.server.schemas import ChatCompletion, ChatCompletionChunk, answers
from kvweave.server.service import Service, start_chat
from kvweave.server.tools import (
    AnswerParser,
    AnswerPart,
    AnswerPlan,
    ReasoningPart,
    TextPart,
    parse,
)


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
        form = _ChatFormat(
            service.texts,
            chat.plan,
            scored=bool(body.logprobs),
            reasons=body.include_reasoning,
            may_call=bool(body.tools),
        )
        return service.respond(chat.generation, body, form, id_prefix="chatcmpl-", notes=chat.notes)

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
