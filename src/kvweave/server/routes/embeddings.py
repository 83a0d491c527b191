"""POST /v1/embeddings, with the sentence embedder that the semantic provider uses.

The served model's own states are no embeddings: it was trained to predict tokens, not to put texts
of one meaning near each other.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import model_validator

from kvweave.errors import ConfigError, RequestError
from kvweave.paraphrase.embedders import EmbedderProcess, Vectors, longest_text
from kvweave.server.fields import Prompts, Whole
from kvweave.server.protocol import RequestBody
from kvweave.server.schemas import Embeddings, answers
from kvweave.server.service import Service

_BATCH = 32
"""Texts that are embedded together; more would need much memory."""


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


class TextEmbedder:
    """The embedder `name`, in a process that starts with the first request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._process: EmbedderProcess | None = None
        self._longest: tuple[int, Callable[[str], int]] | None = None

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Vectors (len(texts), dimension). Blocks. RequestError."""
        with self._lock:
            if self._process is None:
                try:
                    self._longest = longest_text(self.name)
                    self._process = EmbedderProcess(self.name)
                except ConfigError as missing:
                    raise RequestError(
                        f"this server has no embedder: {missing}", status=501, param="model"
                    ) from None
            for at, text in enumerate(texts):
                self._check(at, text)
            batches = (texts[at : at + _BATCH] for at in range(0, len(texts), _BATCH))
            return np.concatenate([self._process.encode(batch) for batch in batches])

    def _check(self, at: int, text: str) -> None:
        if not text.strip():
            raise RequestError(f"input.{at} is empty", param="input")
        if self._longest is not None and (length := self._longest[1](text)) > self._longest[0]:
            raise RequestError(
                f"the embedder {self.name} reads {self._longest[0]} tokens of a text, and "
                f"input.{at} has {length}: embed its parts",
                param="input",
                code="context_length_exceeded",
            )


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
