"""Output of one answer: whole characters, text without stop strings, log probabilities, its end."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from kvweave.engine.sampling.grammar import GrammarCompiler
from kvweave.engine.sampling.sampler import SamplingState
from kvweave.engine.scheduler.request import Sequence
from kvweave.engine.types import FinishReason, OutputDelta, TokenLogprob, Usage
from kvweave.kv.pool import IntArray, runs_of

if TYPE_CHECKING:
    from llguidance import LLMatcher


BROKEN = "\N{REPLACEMENT CHARACTER}"

_CONTEXT = 6
"""Prompt tokens that are decoded before the output, which keeps its first space."""

_LONGEST_CHARACTER = 4
"""Bytes, and so at most tokens, of one character in UTF-8."""

_PATIENCE = 2 * _LONGEST_CHARACTER
"""Tokens in a row that may add no text before held bytes count as broken."""


class Detokenizer:
    """Text of one answer. Amortised O(1) decoded tokens per token added.

    Each token emits the difference that it makes to the decoded text of a short window. Spaces are
    right where a token's text depends on its neighbours (SentencePiece), and characters are whole
    where they span tokens (byte-level BPE, byte fallback): replacement characters at the window's
    end are held back. Bytes that can no longer become a character are emitted as `decode` shows
    them. Needs a `decode` that only appends once the last characters are whole.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt: abc.Sequence[int] | IntArray,
        skipped: Collection[int] = (),
    ) -> None:
        """`decode` shows special tokens as text; those in `skipped` are left out of the output."""
        self._decode = decode
        self._skipped = skipped
        self._window = _context(decode, prompt)
        self._settled, self._emitted = _whole_characters(decode, self._window)
        """Tokens and characters of the window that were emitted or belong to the prompt."""
        self._held = 0
        """Tokens since text was last emitted."""

    def add(self, token: int) -> str:
        """The new text that later tokens cannot change."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        self._held += 1
        text = self._text()
        whole = text.rstrip(BROKEN)
        stuck = self._held > _PATIENCE
        if stuck and len(whole) < len(text):
            return self._give_up(text)
        added = whole[self._emitted :]
        if added:
            self._emitted = len(whole)
            self._held = 0
        if len(whole) == len(text) and (added or stuck):
            self._slide()
        return added

    def finish(self) -> str:
        """The held text: bytes of a character that never ended."""
        text = self._text()
        added = text[self._emitted :]
        self._emitted = len(text)
        return added

    def _slide(self) -> None:
        """Keep the last settled piece only, on which the next token's text may depend."""
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._emitted = len(self._text())
        self._held = 0

    def _give_up(self, text: str) -> str:
        """Emit broken bytes, except those that may still begin a character."""
        pending = _LONGEST_CHARACTER - 1
        added = text[self._emitted : -pending]
        self._window = self._window[-_PATIENCE:]
        self._settled = len(self._window)
        self._emitted = max(0, len(self._text()) - pending)
        self._held = 0
        return added

    def _text(self) -> str:
        return self._decode(self._window) if self._window else ""


def _context(decode: Callable[[list[int]], str], prompt: abc.Sequence[int] | IntArray) -> list[int]:
    """The prompt's last tokens, from the beginning of a character on."""
    recent = [int(token) for token in prompt[-_CONTEXT - _LONGEST_CHARACTER + 1 :]]
    for start in range(max(0, len(recent) - _CONTEXT), -1, -1):
        ends = range(start + 1, start + 1 + _LONGEST_CHARACTER)
        if any(BROKEN not in decode(recent[start:end]) for end in ends):
            return recent[start:]
    return recent


def _whole_characters(decode: Callable[[list[int]], str], tokens: list[int]) -> tuple[int, int]:
    """Numbers of tokens and characters without an unfinished last character."""
    # Byte fallback shows a whole run of bytes as broken until its last character is complete.
    for end in range(len(tokens), max(0, len(tokens) - _LONGEST_CHARACTER), -1):
        text = decode(tokens[:end])
        if not text.endswith(BROKEN):
            return end, len(text)
    return 0, 0


def decoder_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """A transformers tokenizer's decoding, special tokens included and without clean-up."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # Rust, without the layers around it: several times faster
        return partial(backend.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids of special tokens: beginnings, ends, padding, roles."""
    added = {token for token, known in tokenizer.added_tokens_decoder.items() if known.special}
    return frozenset(added | set(tokenizer.all_special_ids))


class StopMatcher:
    """Finds stop strings in a growing text with Knuth-Morris-Pratt automata: O(1) per character.

    Text that may be the beginning of a stop string is held back until that is settled. Special
    tokens that are not shown are `hidden` text: stop strings that spell one are looked for in the
    text with hidden parts, all others in the text as shown.
    """

    def __init__(
        self,
        stops: abc.Sequence[str],
        include: bool = False,
        special: abc.Sequence[str] = (),
    ) -> None:
        """`include`: the stop string itself is shown; `special`: what hidden text may be."""
        self._stops = [_Automaton(text) for text in stops]
        self._special = [
            stop for stop in self._stops if any(token in stop.text for token in special)
        ]
        self._include = include
        self._held = ""
        # Which of the latest characters, hidden ones included, are shown.
        longest = max((len(stop.text) for stop in self._special), default=0)
        self._shown: deque[bool] = deque(maxlen=longest)
        self.matched: str | None = None
        """The stop string that ended the text."""

    @property
    def watches_hidden(self) -> bool:
        """Whether hidden text matters."""
        return bool(self._special)

    def feed(self, text: str, *, hidden: bool = False, may_end: bool = True) -> str:
        """The text that can be shown now that `text` follows; after a match, no more.

        Stop strings that are complete while not `may_end` are passed over.
        """
        watching = self._special if hidden else self._stops
        if not watching:
            return "" if hidden else text
        start = len(self._held)
        if not hidden:
            self._held += text
        for at, character in enumerate(text, start + 1):
            if self._special:
                self._shown.append(not hidden)
            ended = [stop for stop in watching if stop.advance(character)]
            if ended and may_end:
                stop = max(ended, key=lambda each: len(each.text))
                self.matched = stop.text
                end = start if hidden else at
                before = self._held[: end - self._shown_of(stop, len(stop.text))]
                self._held = ""
                return before + stop.text if self._include else before
            for stop in ended:
                stop.pass_over()
        held = max(self._shown_of(stop, stop.progress) for stop in self._stops)
        end = len(self._held) - held
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _shown_of(self, stop: _Automaton, count: int) -> int:
        """How many of the last `count` characters that `stop` has read are shown."""
        if stop not in self._special:
            return count
        return sum(islice(reversed(self._shown), count))

    def finish(self) -> str:
        """The text held back, now that nothing follows."""
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

    def pass_over(self) -> None:
        """Go on after the whole text was read: its end may be the beginning of another one."""
        self.progress = self._fallback[self.progress]


_SIBLING = 0xD1B54A32D192ED03
"""Added to the seed from one answer of a request to the next; odd, which makes all differ."""


class SequenceOutput:
    """Sampling state, text and end of one answer; deltas for its client."""

    def __init__(
        self,
        sequence: Sequence,
        sampling: SamplingState,
        detokenizer: Detokenizer,
        ending: frozenset[int],
        hidden: Mapping[int, str],
    ) -> None:
        """`ending`: tokens that end the answer, which may be sampled but are not shown; `hidden`:
        tokens that are not shown, with their texts.
        """
        params = sampling.params
        self.sequence = sequence
        self.sampling = sampling
        self.finish_reason: FinishReason | None = None
        self._matched: str | int | None = None
        self._detokenizer = detokenizer
        self._hidden = hidden
        special = tuple(hidden.values()) if params.stop else ()
        self._stops = StopMatcher(params.stop, params.include_stop_str_in_output, special)
        self._ending = ending
        scored = params.prompt_logprobs is not None and sequence.index == 0
        self._prompt_logprobs = [TokenLogprob(int(sequence.tokens[0]), None)] if scored else None
        self._told = False
        """Whether a delta has carried the prompt's plan."""

    def score(self, logprobs: Iterable[TokenLogprob]) -> None:
        """Add log probabilities of the next prompt tokens."""
        assert self._prompt_logprobs is not None
        self._prompt_logprobs += logprobs
        self.sequence.scored = len(self._prompt_logprobs) - 1

    def accept(
        self, tokens: abc.Sequence[int], logprobs: abc.Sequence[TokenLogprob] = ()
    ) -> OutputDelta:
        """Append sampled tokens up to the answer's end: then `finish_reason` is set, and the delta
        holds fewer than were given. `logprobs` has one per token, or none.
        """
        text = ""
        for count, token in enumerate(tokens, 1):
            text += self._append(token)
            if self.finish_reason is not None:
                tokens, logprobs = tokens[:count], logprobs[:count]
                break
        return self._delta(text, tuple(tokens), tuple(logprobs))

    def _append(self, token: int) -> str:
        """The text that can be shown once `token` is appended."""
        self.sequence.append(token)
        self.sampling.record(token)
        if token in self._ending:
            return self._end_with(token)
        text = self._watch(self._detokenizer.add(token))
        if self._stops.watches_hidden and token in self._hidden:
            text += self._watch(self._hidden[token], hidden=True)
        grammar = self.sampling.grammar
        if grammar is not None and grammar.finished:
            text += self._flush()
            self.finish_reason = self.finish_reason or "stop"
        elif self.sequence.length >= self.sequence.limit:
            text += self._flush()
            self.finish_reason = self.finish_reason or "length"
        return text

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

    def _watch(self, text: str, *, hidden: bool = False) -> str:
        """The text that can be shown; no stop string ends within the first `min_tokens` tokens."""
        may_end = self.sequence.generated > self.sampling.params.min_tokens
        text = self._stops.feed(text, hidden=hidden, may_end=may_end)
        if self._stops.matched is not None:
            self.finish_reason, self._matched = "stop", self._stops.matched
        return text

    def _flush(self) -> str:
        """The held text, unless a stop string cut it."""
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
        if token_ids and news and sequence.lease is not None:
            group.count_writes(sequence.lease)
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
                reuse=group.reuse,
                cache_write_tokens=group.cache_write_tokens or 0,
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
    """Makes the output of every sequence with the model's tokenizer."""

    def __init__(
        self, tokenizer: Any, eos_token_ids: Iterable[int], grammars: GrammarCompiler
    ) -> None:
        self._grammars = grammars
        self._decode = decoder_of(tokenizer)
        self._special = {
            token: self._decode([token]) for token in sorted(special_tokens(tokenizer))
        }
        self._eos = frozenset(eos_token_ids)

    def make(self, sequence: Sequence, drawn: int, grammar: LLMatcher | None) -> SequenceOutput:
        """`drawn` is the seed of a request without one; its answers get different seeds. `grammar`:
        the request's, compiled.
        """
        params = sequence.group.request.sampling
        prompt = sequence.tokens
        ending = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ending |= self._eos
        seed = drawn if params.seed is None else params.seed
        matcher = None
        if grammar is not None:
            matcher = self._grammars.matcher(grammar, ending, ignore_eos=params.ignore_eos)
        seed += sequence.index * _SIBLING
        sampling = SamplingState(params, prompt, ending, seed, matcher)
        hidden = self._special if params.skip_special_tokens else {}
        detokenizer = Detokenizer(self._decode, prompt, hidden)
        return SequenceOutput(sequence, sampling, detokenizer, ending, hidden)
