"""Grammars that answers must match: compiled once, then one mask of allowed tokens per step.

llguidance compiles grammars and computes masks (docs/decisions/0013). Compiling takes from a
millisecond to a second and lets other threads run; AsyncEngine does it beside the engine's thread.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvweave.engine.types import GrammarSpec
from kvweave.errors import KvweaveError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_CHARS = 2**18
"""Of one grammar's text."""
_MAX_CACHED = 256
_WHITESPACE = r"[ \n\t]{1,32}"
"""Between the parts of JSON: enough to indent by, too little to fill an answer with."""
_KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Values of `format` that llguidance enforces; others say nothing that can be checked."""
_NOT_SCHEMAS = frozenset({"const", "enum", "default", "examples"})


class GrammarMatcher:
    """Where one answer stands in its grammar; belongs to the engine's thread."""

    __slots__ = ("_address", "_ending", "_goes_on", "_mask", "_matcher")

    def __init__(self, matcher: LLMatcher, ending: npt.NDArray[np.int32], goes_on: bool) -> None:
        """`ending`: bits of the tokens that may end a complete answer; `goes_on`: a complete answer
        ends only where nothing can follow (ignore_eos)."""
        self._matcher = matcher
        self._ending = ending
        self._goes_on = goes_on
        self._mask = np.zeros_like(ending)
        self._address = self._mask.ctypes.data

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return bool(self._matcher.is_stopped())

    def accept(self, token: int) -> None:
        """The answer goes on with `token`, which is none that ends it."""
        if not self._matcher.consume_token(token):
            raise KvweaveError(f"the grammar cannot go on: {_reason(self._matcher)}")

    def surely_allows(self, token: int) -> bool:
        """Whether `token` may come next, as far as that is known without the whole mask: False for
        tokens that end an answer, and where the grammar cannot go on.
        """
        ends = self._ending[token >> 5] >> (token & 31) & 1
        return not ends and bool(self._matcher.validate_tokens([token]))

    def allowed_run(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first on, the grammar allows one after another."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def twin(self) -> GrammarMatcher:
        """The same place in the grammar, which goes on by itself."""
        return GrammarMatcher(self._matcher.deep_copy(), self._ending, self._goes_on)

    def mask(self) -> npt.NDArray[np.int32]:
        """One bit per token: whether it may come next. Valid until the next call."""
        mask, matcher = self._mask, self._matcher
        matcher.unsafe_compute_mask_ptr(self._address, mask.nbytes)
        if matcher.is_error():
            raise KvweaveError(f"the grammar cannot go on: {_reason(matcher)}")
        if matcher.is_accepting():
            if not self._goes_on:
                mask |= self._ending
            elif (further := mask & ~self._ending).any():
                mask[:] = further
        return mask


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the latest. Any thread may use it."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._hf = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._read: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()

    def prepare(self) -> None:
        """Read the vocabulary ahead of the first grammar: that holds up all threads for a moment.

        A tokenizer that llguidance cannot read only fails the requests that have a grammar.
        """
        with suppress(RequestError):
            self._tokenizer()

    def _tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        if self._read is None:
            try:
                size = max(self._vocab_size, len(self._hf))
                self._read = from_tokenizer(self._hf, n_vocab=size, eos_token=self._eos or None)
            except Exception as failure:
                raise RequestError(
                    f"grammars cannot be enforced with this model's tokenizer: {failure!r:.300}"
                ) from failure
        return self._read

    def compile(self, spec: GrammarSpec) -> LLMatcher:
        """The grammar at its beginning. RequestError, in words, if it cannot be compiled.

        Two threads may compile the same grammar at once: the results are equal.
        """
        with self._lock:
            known = self._compiled.get(spec)
            if known is not None:
                self._compiled.move_to_end(spec)
                return known
        made = self._make(spec)
        with self._lock:
            self._compiled[spec] = made
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        return made

    def matcher(
        self, compiled: LLMatcher, ending: Iterable[int], *, ignore_eos: bool = False
    ) -> GrammarMatcher:
        """A matcher of one answer. `ending`: tokens that end it, those of the model's included."""
        tokens = self._eos if ignore_eos else ending
        bits = np.zeros(-(-self._tokenizer().vocab_size // 32) * 32, np.bool_)
        bits[list(tokens)] = True
        packed = np.packbits(bits, bitorder="little").view(np.int32)
        return GrammarMatcher(compiled.deep_copy(), packed, ignore_eos)

    def _make(self, spec: GrammarSpec) -> LLMatcher:
        from llguidance import LLMatcher

        if len(spec.text) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"{spec.param} has {len(spec.text):,} characters: a grammar may have "
                f"{MAX_GRAMMAR_CHARS:,}",
                param=spec.param,
            )
        try:
            matcher = LLMatcher(self._tokenizer(), _source(spec), log_level=0)
        except (ValueError, RecursionError) as failure:
            raise _refusal(spec, str(failure)) from None
        if matcher.is_error():
            raise _refusal(spec, _reason(matcher))
        return matcher


def _source(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    if spec.kind == "llguidance":
        return spec.text
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "lark":
        return LLMatcher.grammar_from_lark(spec.text)
    return LLMatcher.grammar_from_json_schema(json.dumps(enforceable(json.loads(spec.text))))


def enforceable(schema: Any) -> Any:
    """The schema as llguidance is given it: with bounded white space, without unknown formats."""
    schema = _without_unknown_formats(schema)
    if not isinstance(schema, dict):
        schema = {} if schema is True else {"not": {}}
    return {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}


def _without_unknown_formats(schema: Any) -> Any:
    """Without values of `format` that nobody checks: the keyword is an annotation."""
    if isinstance(schema, list):
        return [_without_unknown_formats(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value if name in _NOT_SCHEMAS else _without_unknown_formats(value)
        for name, value in schema.items()
        if not (name == "format" and isinstance(value, str) and value not in _KNOWN_FORMATS)
    }


def _refusal(spec: GrammarSpec, reason: str) -> RequestError:
    return RequestError(
        f"{spec.param} cannot be compiled to a grammar: {reason:.500}", param=spec.param
    )


def _reason(matcher: LLMatcher) -> str:
    """llguidance's own words, on one line."""
    return " ".join(matcher.get_error().split()) or "no reason is given"
