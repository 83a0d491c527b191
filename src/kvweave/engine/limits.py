"""What a request may ask of this engine, said before it is queued."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from kvweave.engine.types import GenerateRequest
from kvweave.errors import RequestError


@dataclass(frozen=True, slots=True)
class Limits:
    """Constant while the engine lives, so that any thread may ask."""

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

    def longest(self, request: GenerateRequest) -> int:
        """The length, prompt included, at which an answer ends.

        The pool counts one more than it holds: nobody reads the KV of the last token.
        """
        room = min(self.context_length, self.pool_tokens + 1)
        wanted = request.sampling.max_tokens
        return room if wanted is None else min(room, len(request.prompt_ids) + wanted)

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
                f"This model's maximum context length is {self.pool_tokens} tokens on this server, "
                f"whose KV pool holds {self.pool_tokens} (--max-total-tokens). However, the prompt "
                f"has {prompt} tokens",
                param="prompt",
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
