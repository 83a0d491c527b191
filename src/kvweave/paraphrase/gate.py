"""The gate for paraphrases: cuts tokens into sentences and compares what donor and prompt say."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.donors import DonorTree
from kvweave.fuzzy.guard import contained
from kvweave.fuzzy.provider import Candidate
from kvweave.kv.pool import IntArray
from kvweave.paraphrase.facts import Verifier, differing, literal
from kvweave.paraphrase.verifiers import VerifierWorker, create_verifier
from kvweave.prefix.contract import Declined
from kvweave.prefix.lease import RequestView

Decode = Callable[[IntArray], str]
"""Token ids (int32) to text, special tokens spelled out."""

LONGEST = 128
"""Most tokens of a passage; a longer one is not compared."""

_KNOWN, _ENDS, _BREAKS, _DIGIT = 1, 2, 4, 8
"""Flags of a token. A line's end breaks and ends a sentence; a special token only breaks it."""
_SENTENCE_END = re.compile(r"[.!?\u2026\u3002\uff01\uff1f][\"'\u2019\u201d)\]]*\s*$")
_SPECIAL = re.compile(r"\s*<\S*>\s*$")


class Passage(NamedTuple):
    """Tokens `start` to `end`: a sentence, or a line."""

    start: int
    end: int


class Cutter:
    """Cuts tokens into passages; each token id is decoded once.

    A passage ends with a full stop, question or exclamation mark that no digit follows, with a
    line, and before and after a special token. Equal tokens of two prompts are cut alike.
    """

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._flags = np.zeros(0, np.uint8)

    def cut(self, tokens: IntArray, offset: int = 0) -> list[Passage]:
        """All passages of `tokens`, whose first one has position `offset`; the last may be part of
        a longer one."""
        ends = np.flatnonzero(self._ends(tokens)) + 1
        edges = [0, *ends.tolist()]
        if edges[-1] < len(tokens):
            edges.append(len(tokens))
        return [Passage(offset + start, offset + end) for start, end in pairwise(edges)]

    def around(self, tokens: IntArray, start: int, end: int) -> Passage:
        """The least run of whole passages that holds `start` to `end`, as far as `tokens` go."""
        first = max(0, start - LONGEST)
        ends = np.flatnonzero(self._ends(tokens[first : end + LONGEST])) + first + 1
        before, behind = ends[ends <= start], ends[ends >= end]
        return Passage(
            int(before[-1]) if len(before) else first,
            int(behind[0]) if len(behind) else min(len(tokens), end + LONGEST),
        )

    def text(self, tokens: IntArray) -> str:
        """The text of a passage, without white space around it."""
        return self.decode(tokens).strip()

    def _ends(self, tokens: IntArray) -> npt.NDArray[np.bool_]:
        """Which tokens are the last ones of their passage."""
        flags = self._of(tokens)
        following = np.append(flags[1:], np.uint8(0))
        sentence = (flags & _ENDS != 0) & (following & _DIGIT == 0)
        special = following & (_BREAKS | _ENDS) == _BREAKS
        ends: npt.NDArray[np.bool_] = sentence | (flags & _BREAKS != 0) | special
        return ends

    def _of(self, tokens: IntArray) -> npt.NDArray[np.uint8]:
        if len(tokens) and int(tokens.max()) >= len(self._flags):
            grown = np.zeros(2 * int(tokens.max()) + 1, np.uint8)
            grown[: len(self._flags)] = self._flags
            self._flags = grown
        for token in np.unique(tokens[self._flags[tokens] == 0]).tolist():
            self._flags[token] = _KNOWN | _kind(self.decode(np.array([token], np.int32)))
        return self._flags[tokens]


def _kind(text: str) -> int:
    if _SPECIAL.match(text):
        return _BREAKS
    kind = _ENDS if _SENTENCE_END.search(text) else 0
    if "\n" in text:
        kind |= _BREAKS | _ENDS
    return kind | (_DIGIT if text[:1].isdigit() else 0)


_log = logging.getLogger(__name__)

UNKNOWN_TURN = 128
"""Tokens at a prompt's end that count as its question when its position is unknown."""

_REMEMBERED = 256


def question_of(view: RequestView) -> int:
    """The position from which on no paraphrase may be served."""
    if view.protected_from is None:
        return max(0, len(view.tokens) - UNKNOWN_TURN)
    return view.protected_from


class ParaphraseGate:
    """Judges candidates and chooses those that fit between the spans served already."""

    def __init__(
        self,
        donors: DonorTree,
        config: FuzzyConfig,
        cutter: Cutter | None,
        verifier: Verifier | None = None,
    ) -> None:
        """Without a cutter no text can be read, and no candidate passes."""
        self._donors = donors
        self._config = config
        self._cutter = cutter
        self._verifier = None if verifier is None else VerifierWorker(verifier)
        self.facts: Verifier = differing
        """Compares facts. Benches replace it."""
        self.declined: Counter[str] = Counter()
        """Candidates declined, by kind."""
        self.latest_declined: deque[Declined] = deque(maxlen=_REMEMBERED)
        """The latest of them."""

    def fill(
        self, view: RequestView, exact: int, pieces: list[Candidate], claims: Iterable[Candidate]
    ) -> list[Candidate]:
        """`pieces` and the `claims` that pass, ascending; of overlapping claims, the first wins.

        If nothing is moved and less than the least worthwhile share passes, nothing is served.
        """
        length = len(view.tokens)
        moved = sum(piece.length for piece in pieces)
        room = min(
            int(self._config.semantic_max_share * length),
            int(self._config.max_share * length) - moved,
        )
        chosen = list(pieces)
        until = time.perf_counter() + self._config.semantic_budget_ms / 1000
        for claim in claims:
            try:
                if self._overlaps(claim, chosen):
                    continue  # its place is taken, most often by a better one
                objection = self._too_much(claim, room) or contained(
                    partial(self._objection, view, exact, claim, until)
                )
            except Exception as error:  # tokenizers and verifiers are foreign code
                _log.debug("a paraphrase could not be judged", exc_info=True)
                objection = "failed", f"it could not be judged: {error!r}"
            if objection is None:
                chosen.append(claim)
                room -= claim.length
            else:
                self._note(view, claim, *objection)
        served = sum(piece.length for piece in chosen)
        if not pieces and served < self._config.min_reuse_ratio * length:
            return []
        return sorted(chosen, key=lambda piece: piece.start)

    def stats(self) -> dict[str, float]:
        """Refusals by kind."""
        return {f"paraphrase_{kind}": float(count) for kind, count in self.declined.items()}

    def _overlaps(self, claim: Candidate, chosen: list[Candidate]) -> bool:
        begin = claim.start - claim.lead
        return any(begin < other.end and other.start - other.lead < claim.end for other in chosen)

    def _note(self, view: RequestView, claim: Candidate, kind: str, reason: str) -> None:
        self.declined[kind] += 1
        if kind != "failed":
            begin = claim.start - claim.lead
            self.latest_declined.append(Declined(view.rid, begin, claim.end, kind, reason))

    def _objection(
        self, view: RequestView, exact: int, claim: Candidate, until: float
    ) -> tuple[str, str] | None:
        """The first reason against `claim`, as a kind and a sentence; None if there is none."""
        return (
            self._misplaced(view, exact, claim)
            or self._gone(view, claim)
            or self._different(view, claim, until)
        )

    def _too_much(self, claim: Candidate, room: int) -> tuple[str, str] | None:
        if claim.length <= room:
            return None
        return "share", f"the shares that may be served have {max(room, 0)} tokens left for it"

    def _misplaced(self, view: RequestView, exact: int, claim: Candidate) -> tuple[str, str] | None:
        config, begin = self._config, claim.start - claim.lead
        if claim.lead < 0 or claim.length < 1:
            return "lengths", f"{claim.length} tokens cannot stand for {claim.end - begin}"
        if claim.length < config.semantic_min_span:
            # A few tokens are computed in the same step as their neighbours: no gain, some risk.
            least = config.semantic_min_span
            return "lengths", f"it would save {claim.length} of the {least} tokens it has to"
        if begin < max(exact, config.sink_tokens):
            return "placed", "it reaches into what is served exactly, or into the first tokens"
        if claim.end > question_of(view) or claim.end > len(view.tokens) - config.min_suffix:
            return "question", "it reaches into the last question, which is always computed"
        if claim.similarity < config.semantic_threshold:
            return "unlike", f"a likeness of {claim.similarity:.2f} is too little"
        return None

    def _gone(self, view: RequestView, claim: Candidate) -> tuple[str, str] | None:
        node = self._donors.node(claim.page)
        if node is None or node.namespace != view.namespace:
            return "gone", "its donor is not cached here"
        if claim.donor_start < self._config.sink_tokens:
            return "placed", "a donor's first tokens are never lent"
        held = self._donors.tokens(claim.page, claim.donor_start)[: claim.length]
        if claim.donor_tokens is None or not np.array_equal(held, claim.donor_tokens):
            return "gone", "its donor holds other text by now"
        return None

    def _different(
        self, view: RequestView, claim: Candidate, until: float
    ) -> tuple[str, str] | None:
        if self._cutter is None:
            return "failed", "nothing here can read tokens"
        donor, recipient = self._sentences(self._cutter, view, claim)
        found = self.facts(donor, recipient)
        if found is not None:
            return "facts", found
        if literal(self._cutter.decode(view.tokens[: claim.start - claim.lead])):
            return "facts", "it stands in code or in a quotation, where every character may matter"
        if self._verifier is None:
            return None
        return self._verifier.objection(view.namespace, donor.strip(), recipient.strip(), until)

    def _sentences(self, cutter: Cutter, view: RequestView, claim: Candidate) -> tuple[str, str]:
        """The texts of donor and prompt at the claim, extended to whole sentences."""
        first = max(0, claim.donor_start - LONGEST)
        donor = self._donors.tokens(claim.page, first)
        begin = claim.donor_start - first
        return (
            _around(cutter, donor, begin, begin + claim.length),
            _around(cutter, view.tokens, claim.start - claim.lead, claim.end),
        )


def _around(cutter: Cutter, tokens: IntArray, start: int, end: int) -> str:
    whole = cutter.around(tokens, start, end)
    return cutter.decode(tokens[whole.start : whole.end])  # with the indentation of code


def create_gate(
    donors: DonorTree, config: FuzzyConfig, decode: Callable[[IntArray], str] | None
) -> ParaphraseGate:
    """The gate that `config` asks for; ConfigError if its verifier does not start."""
    return ParaphraseGate(
        donors, config, Cutter(decode) if decode else None, create_verifier(config)
    )
