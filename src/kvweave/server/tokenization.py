"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from kvweave.server.openapi import answers
from kvweave.server.protocol import DetokenizeBody, TokenizeBody
from kvweave.server.schemas import Text, Tokens
from kvweave.server.service import Service


def tokenization_router(service: Service) -> APIRouter:
    """The two routes, bound to `service`."""
    router = APIRouter()
    card, reader, texts = service.card, service.reader, service.texts

    @router.post("/tokenize", response_model=None, responses=answers(Tokens, 404))
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        card.require(body.model)
        if body.messages is not None:
            ids = await reader.chat(body.messages, body.tools, body.chat_template_kwargs)
        else:
            assert body.prompt is not None, "the body holds one of the two"
            ids = await reader.encode(
                body.prompt, param="prompt", add_special_tokens=body.add_special_tokens
            )
        answer = {"count": len(ids), "max_model_len": card.context_length, "tokens": list(ids)}
        if body.return_token_strs:
            answer["token_strs"] = [texts.of(token)[0] for token in ids]
        return answer

    @router.post("/detokenize", response_model=None, responses=answers(Text, 404))
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        card.require(body.model)
        ids = reader.known(body.tokens, param="tokens")
        text = await reader.decode(ids, skip_special_tokens=body.skip_special_tokens)
        # One name is vLLM's, the other SGLang's.
        return {"prompt": text, "text": text}

    return router
