"""The Python interface: loads a model and answers prompts without a server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, TypeAlias, overload

import numpy as np

from kvweave.config import EngineConfig
from kvweave.config.base import kinds_of, make, read
from kvweave.engine.engine import Engine
from kvweave.engine.types import Completion, GenerateRequest, SamplingParams
from kvweave.errors import RequestError
from kvweave.kv.pool import IntArray
from kvweave.reorder import Pieces, Proposal, confirmed, propose, tokens_within

Prompt: TypeAlias = str | Sequence[int]
Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages: {"role": "user", "content": "..."} and so on, oldest first."""
Sampling: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model, loaded and ready.

    >>> llm = LLM(prefix_cache_backend="radix")
    >>> params = SamplingParams(max_tokens=8, temperature=0)
    >>> llm.generate("The capital of France is", params)[0].text

    Keyword arguments are the flags of the command line, with underscores.
    """

    def __init__(self, model: str | None = None, **flags: Any) -> None:
        """Without `model`, the packaged one. Raises ConfigError, UnsupportedModelError."""
        # Here: they load the models' code.
        from kvweave.engine.selfcheck.gate import guarded
        from kvweave.models.load import load_model

        config = config_of(model=model, **flags)
        config.validate()
        loaded = load_model(config.model)
        config, self.self_check = guarded(config, loaded)
        """The result of the self-check for moved text; None where it was not run."""
        self.engine = Engine(config, loaded)
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self.engine.loaded.tokenizer

    @overload
    def generate(  # type: ignore[overload-overlap]  # a string is a sequence of strings
        self, prompts: Prompt, sampling: Sampling = None
    ) -> list[Completion]: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling = None
    ) -> list[list[Completion]]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling = None,
    ) -> list[Completion] | list[list[Completion]]:
        """Answer one prompt (a text, or its token ids), or many of them together.

        Returns the `n` completions of a single prompt, or such a list for each of many. `sampling`
        is for all prompts, or one per prompt; without it, the model's generation_config holds
        where it says something. Raises RequestError, before anything is computed, if
        a prompt cannot be served; a failure afterwards ends that completion with "error".
        """
        single = isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral))
        many: Any = [prompts] if single else prompts
        requests = [
            self._request(prompt, params)
            for prompt, params in zip(many, self._per_prompt(sampling, len(many)), strict=True)
        ]
        for request in requests:
            self.engine.limits.check(request)
        answers = self._run(requests)
        return answers[0] if single else answers

    @overload
    def chat(
        self, conversations: Conversation, sampling: Sampling = None, **variables: Any
    ) -> list[Completion]: ...

    @overload
    def chat(
        self, conversations: Sequence[Conversation], sampling: Sampling = None, **variables: Any
    ) -> list[list[Completion]]: ...

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling: Sampling = None,
        **variables: Any,
    ) -> list[Completion] | list[list[Completion]]:
        """Answer the last message of one conversation, or of each of many; as `generate` returns.

        The model's chat template writes the prompts; `variables` are arguments of
        `tokenizer.apply_chat_template` and of the template. Raises RequestError if the model has no
        template, or if the template refuses the messages.
        """
        single = not conversations or isinstance(conversations[0], Mapping)
        many: Any = [conversations] if single else conversations
        answers = self.generate([self._written(each, variables) for each in many], sampling)
        return answers[0] if single else answers

    def propose_order(self, head: str, pieces: Sequence[str], tail: str = "") -> Proposal:
        """The order of `pieces` in which most of head, pieces and tail is cached: exact reuse.

        Nothing is reordered: `order` lists indices of `pieces`, to be joined in
        that order, without anything between them. `gain` 0 means that the given order is best.
        """

        def prompt(order: Iterable[int]) -> IntArray:
            text = "".join([head, *(pieces[at] for at in order), tail])
            return np.array(self.tokenizer.encode(text), np.int32)

        def within(text: str) -> IntArray:
            return tokens_within(partial(self.tokenizer.encode, add_special_tokens=False), text)

        known = self.engine.prefixes()
        beginning = np.array(self.tokenizer.encode(head), np.int32)
        proposal = propose(Pieces(beginning, [*map(within, pieces)], within(tail)), known)
        return confirmed(known, proposal, prompt(range(len(pieces))), prompt(proposal.order))

    def flush_cache(self) -> None:
        """Forget all cached KV."""
        self.engine.flush_cache()

    def close(self) -> None:
        """Write what --kv-store is still to keep; nothing can be generated afterwards."""
        self.engine.dead = True
        self.engine.close()

    def _written(self, conversation: Conversation, variables: Mapping[str, Any]) -> list[int]:
        """The prompt's token ids, as the chat template writes it for an answer."""
        if self.tokenizer.chat_template is None:
            raise RequestError("this model has no chat template: use generate, or --chat-template")
        options = {"add_generation_prompt": True, **variables, "tokenize": False}
        try:
            text = self.tokenizer.apply_chat_template(list(conversation), **options)
        except Exception as error:  # templates raise whatever they like
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def _request(self, prompt: Prompt, params: SamplingParams) -> GenerateRequest:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return GenerateRequest(
            rid=f"prompt-{next(self._ids)}", prompt_ids=tuple(token_ids), sampling=params
        )

    def _per_prompt(self, sampling: Sampling, count: int) -> Sequence[SamplingParams]:
        if sampling is None:
            given: dict[str, Any] = dict(self.engine.loaded.sampling)
            return [SamplingParams(**given)] * count
        if isinstance(sampling, SamplingParams):
            return [sampling] * count
        if len(sampling) != count:
            raise ValueError(
                f"{count} prompts need {count} sampling parameters, not {len(sampling)}"
            )
        return sampling

    def _run(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """Keep the queue filled until all are answered; on an error, abort those that are left."""
        answers = {r.rid: [Completion() for _ in range(r.sampling.n)] for r in requests}
        room = self.engine.config.scheduler.max_queued_requests
        start, to_add = time.perf_counter(), iter(requests)
        try:
            self._fill(to_add, room)
            while self.engine.has_work:
                deltas = self.engine.step()
                elapsed = time.perf_counter() - start
                for delta in deltas:
                    answer = answers[delta.rid][delta.index]
                    answer.extend(delta)
                    if answer.first_token_seconds is None and delta.token_ids:
                        answer.first_token_seconds = elapsed
                self._fill(to_add, room)
        finally:
            for rid in answers:
                self.engine.abort(rid)
        return list(answers.values())

    def _fill(self, requests: Iterator[GenerateRequest], room: int) -> None:
        while len(self.engine.scheduler.waiting) < room:
            request = next(requests, None)
            if request is None:
                return
            self.engine.add(request)


def config_of(**flags: Any) -> EngineConfig:
    """An EngineConfig out of settings by name; ConfigError lists unknown names and wrong types."""
    problems: list[str] = []
    values = read(flags.items(), kinds_of(EngineConfig), problems)
    config: EngineConfig
    [config] = make([EngineConfig], values, problems)
    config.warn_without_effect(values)
    return config
