"""Stop strings, found across the borders of tokens and never shown, not even in part."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from kvweave.engine.output.detokenizer import Detokenizer, decoder_of, special_tokens
from kvweave.engine.sampling.sampler import SamplingState
from kvweave.engine.scheduler.request import Sequence
from kvweave.engine.types import FinishReason, OutputDelta, TokenLogprob, Usage
from kvweave.prefix.plan import runs_of


class StopMatcher:
    """Watches a text that grows, by the automaton of Knuth, Morris and Pratt: O(1) per character.

    What may turn out to be the beginning of a stop string is held back until it is clear.
    """

    def __init__(self, stops: SequenceOf[str], include: bool = False) -> None:
        """`include`: the stop string itself belongs to the text."""
        self._stops = [_Automaton(text) for text in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """What may be shown, given that the text goes on with `text`; after a match, no more."""
        if not self._stops:
            return text
        text, start = self._held + text, len(self._held)
        for at in range(start, len(text)):
            ended = [stop for stop in self._stops if stop.advance(text[at])]
            if ended:
                self.matched = max((stop.text for stop in ended), key=len)
                self._held = ""
                cut = at + 1
                return text[:cut] if self._include else text[: cut - len(self.matched)]
        shown = len(text) - max(stop.progress for stop in self._stops)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """`progress`: how many characters of `text` the stream ends with."""

    __slots__ = ("_fallback", "progress", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.progress = 0
        # _fallback[i]: the longest proper prefix of text[:i] that is also its suffix.
        self._fallback = fallback = [0, 0]
        length = 0
        for character in text[1:]:
            while length and text[length] != character:
                length = fallback[length]
            length += text[length] == character
            fallback.append(length)

    def advance(self, character: str) -> bool:
        """Read one character; True once the whole text has just been read."""
        while self.progress and self.text[self.progress] != character:
            self.progress = self._fallback[self.progress]
        self.progress += self.text[self.progress] == character
        return self.progress == len(self.text)


_SIBLING = 0xD1B54A32D192ED03
"""Added to the seed from one answer of a request to the next; odd, so that they all differ."""


class SequenceOutput:
    """A sequence's voice: everything about it that is not scheduling."""

    def __init__(
        self,
        sequence: Sequence,
        sampling: SamplingState,
        detokenizer: Detokenizer,
        ending: frozenset[int],
    ) -> None:
        """`ending`: the tokens that end the answer, which may be sampled but are not shown."""
        params = sampling.params
        self.sequence = sequence
        self.sampling = sampling
        self.finish_reason: FinishReason | None = None
        self._matched: str | int | None = None
        self._detokenizer = detokenizer
        self._stops = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._ending = ending
        scored = params.prompt_logprobs is not None and sequence.index == 0
        self._prompt_logprobs = [TokenLogprob(int(sequence.tokens[0]), None)] if scored else None
        self._told = False
        """The first delta has told where the prompt's KV came from."""

    def score(self, logprobs: Iterable[TokenLogprob]) -> None:
        """The next prompt tokens' log probabilities."""
        assert self._prompt_logprobs is not None
        self._prompt_logprobs += logprobs
        self.sequence.scored = len(self._prompt_logprobs) - 1

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> OutputDelta:
        """Go on with a sampled token; `finish_reason` tells whether it was the last."""
        self.sequence.append(token)
        self.sampling.record(token)
        if token in self._ending:
            text = self._end_with(token)
        else:
            text = self._watch(self._detokenizer.add(token))
            if self.sequence.length >= self.sequence.limit:
                text += self._flush()
                self.finish_reason = self.finish_reason or "length"
        return self._delta(text, (token,), () if logprob is None else (logprob,))

    def end(self, reason: FinishReason, error: str | None = None) -> OutputDelta:
        """End without another token."""
        self.finish_reason = reason
        return self._delta("", (), (), error)

    def _end_with(self, token: int) -> str:
        shown = self.sampling.params.include_stop_str_in_output
        text = self._watch(self._detokenizer.add(token)) if shown else ""
        text += self._flush()
        if self.finish_reason is None:
            self.finish_reason, self._matched = "stop", token
        return text

    def _watch(self, text: str) -> str:
        """What of `text` may be shown; the first `min_tokens` tokens are not searched for stops."""
        if self.sequence.generated <= self.sampling.params.min_tokens:
            return text
        text = self._stops.feed(text)
        if self._stops.matched is not None:
            self.finish_reason, self._matched = "stop", self._stops.matched
        return text

    def _flush(self) -> str:
        """All that was held back, unless a stop string cut it."""
        if self.finish_reason is not None:
            return ""
        text = self._watch(self._detokenizer.finish())
        return text if self.finish_reason is not None else text + self._stops.finish()

    def _delta(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        error: str | None = None,
    ) -> OutputDelta:
        sequence, group = self.sequence, self.sequence.group
        news = not self._told and sequence.lease is not None
        self._told = True
        prompt_logprobs = None
        if self._prompt_logprobs is not None and not sequence.scores_prompt:
            prompt_logprobs = tuple(self._prompt_logprobs)
            self._prompt_logprobs = None
        return OutputDelta(
            rid=group.request.rid,
            index=sequence.index,
            text=text,
            token_ids=token_ids,
            usage=Usage(
                prompt_tokens=sequence.prompt_length,
                completion_tokens=sequence.generated,
                cached_tokens=group.cached_tokens,
                moved_tokens=group.moved_tokens,
                paraphrase_tokens=group.paraphrase_tokens,
                refreshed_tokens=group.refreshed_tokens,
            ),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=self.finish_reason,
            matched_stop=self._matched,
            error=error,
            plan=sequence.plan.spans if news else (),
            refreshed=runs_of(np.sort(np.concatenate(sequence.recomputed))) if news else (),
        )


class SequenceOutputFactory:
    """Gives every sequence its answer; knows the tokenizer."""

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int]) -> None:
        self._decode = decoder_of(tokenizer)
        self._special = special_tokens(tokenizer)
        self._eos = frozenset(eos_token_ids)

    def make(self, sequence: Sequence, drawn: int) -> SequenceOutput:
        """`drawn` is the seed where the request brings none; sibling answers get different ones."""
        params = sequence.group.request.sampling
        prompt = sequence.tokens
        ending = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ending |= self._eos
        seed = drawn if params.seed is None else params.seed
        sampling = SamplingState(params, prompt, ending, seed + sequence.index * _SIBLING)
        skipped = self._special if params.skip_special_tokens else frozenset[int]()
        return SequenceOutput(
            sequence, sampling, Detokenizer(self._decode, prompt, skipped), ending
        )
