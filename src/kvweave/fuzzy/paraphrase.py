"""Whether other words say the same: what a candidate of tier paraphrase has to pass.

A provider nominates by likeness, and likeness cannot tell 20 from -20. So what it proposes is
compared as text, whole sentences on both sides, before anything is served; whatever goes wrong on
the way is a refusal.

A region of m tokens is served from n <= m donor tokens, so that the model reads all of what the
donor says: the donor's run ends where the region ends, and the m - n tokens at the region's
beginning (`lead`) are computed. So the run joins what follows without a seam, where that comes from
the same donor. A donor's longer text would have to be cut, and with it maybe a fact.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.donors import DonorTree
from kvweave.fuzzy.facts import Verifier, differing
from kvweave.fuzzy.passages import LONGEST, Cutter
from kvweave.fuzzy.provider import Candidate
from kvweave.fuzzy.verifiers import Bench
from kvweave.kv.pool import IntArray
from kvweave.prefix.base import Declined
from kvweave.prefix.lease import RequestView
from kvweave.prefix.plan import Tier

_log = logging.getLogger(__name__)

UNKNOWN_TURN = 128
"""Tokens at the end of a prompt that count as its question if nobody knows where that begins."""

_REMEMBERED = 256


def question_of(view: RequestView) -> int:
    """The position from which on nothing may be served in other words."""
    if view.protected_from is None:
        return max(0, len(view.tokens) - UNKNOWN_TURN)
    return view.protected_from


class ParaphraseGate:
    """Judges candidates and chooses those that fit between what is served already."""

    def __init__(
        self,
        donors: DonorTree,
        config: FuzzyConfig,
        cutter: Cutter | None,
        verifier: Verifier | None = None,
    ) -> None:
        """Without a cutter nothing can be read, and so nothing passes."""
        self._donors = donors
        self._config = config
        self._cutter = cutter
        self._bench = None if verifier is None else Bench(verifier)
        self.facts: Verifier = differing
        """Compares facts; benches put other ways of doing so in its place."""
        self.refused: Counter[str] = Counter()
        """Candidates refused, by kind."""
        self.refusals: deque[Declined] = deque(maxlen=_REMEMBERED)
        """The latest of them."""

    def fill(
        self, view: RequestView, exact: int, pieces: list[Candidate], claims: Iterable[Candidate]
    ) -> list[Candidate]:
        """`pieces` and those of `claims` that pass, ascending; first come, first served.

        Where nothing was moved, less than the least worthwhile share leaves the request exact.
        """
        length = len(view.tokens)
        moved = sum(piece.length for piece in pieces)
        room = min(
            int(self._config.fuzzy_semantic_max_share * length),
            int(self._config.fuzzy_max_share * length) - moved,
        )
        chosen = list(pieces)
        until = time.perf_counter() + self._config.fuzzy_semantic_budget_ms / 1000
        for claim in claims:
            try:
                if self._overlaps(claim, chosen):
                    continue  # its place is taken, most often by a better one
                refusal = self._too_much(claim, room) or self._refusal(view, exact, claim, until)
            except Exception as error:  # it came from elsewhere, and may be anything
                _log.debug("a paraphrase could not be judged", exc_info=True)
                refusal = "failed", f"it could not be judged: {error!r}"
            if refusal is None:
                chosen.append(claim)
                room -= claim.length
            else:
                self._note(view, claim, *refusal)
        served = sum(piece.length for piece in chosen)
        if not pieces and served < self._config.fuzzy_min_reuse_ratio * length:
            return []
        return sorted(chosen, key=lambda piece: piece.start)

    def stats(self) -> dict[str, float]:
        """Refusals by kind."""
        return {f"paraphrase_{kind}": float(count) for kind, count in self.refused.items()}

    def _overlaps(self, claim: Candidate, chosen: list[Candidate]) -> bool:
        begin = claim.start - claim.lead
        return any(begin < other.end and other.start - other.lead < claim.end for other in chosen)

    def _note(self, view: RequestView, claim: Candidate, kind: str, reason: str) -> None:
        self.refused[kind] += 1
        if kind != "failed":
            begin = claim.start - claim.lead
            self.refusals.append(Declined(view.rid, begin, claim.end, kind, reason))

    def _refusal(
        self, view: RequestView, exact: int, claim: Candidate, until: float
    ) -> tuple[str, str] | None:
        """Why not, as a kind and a sentence; None if there is no reason."""
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
        if claim.length < config.fuzzy_semantic_min_span:
            # Few are computed along with what stands around them, in the same step: to read other
            # words for their sake would be a risk for nothing.
            least = config.fuzzy_semantic_min_span
            return "lengths", f"it would save {claim.length} of the {least} tokens it has to"
        if begin < max(exact, config.fuzzy_sink_tokens):
            return "placed", "it reaches into what is served exactly, or into the first tokens"
        if claim.end > question_of(view) or claim.end > len(view.tokens) - config.fuzzy_min_suffix:
            return "question", "it reaches into the last question, which is always computed"
        if claim.similarity < config.fuzzy_semantic_threshold:
            return "unlike", f"a likeness of {claim.similarity:.2f} is too little"
        return None

    def _gone(self, view: RequestView, claim: Candidate) -> tuple[str, str] | None:
        node = self._donors.node(claim.page)
        if node is None or node.namespace != view.namespace:
            return "gone", "its donor is not cached here"
        if claim.donor_start < self._config.fuzzy_sink_tokens:
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
        return None if self._bench is None else self._bench.objection(donor, recipient, until)

    def _sentences(self, cutter: Cutter, view: RequestView, claim: Candidate) -> tuple[str, str]:
        """What donor and prompt say there, to the ends of their sentences."""
        first = max(0, claim.donor_start - LONGEST)
        donor = self._donors.tokens(claim.page, first)
        begin = claim.donor_start - first
        return (
            _around(cutter, donor, begin, begin + claim.length),
            _around(cutter, view.tokens, claim.start - claim.lead, claim.end),
        )


def _around(cutter: Cutter, tokens: IntArray, start: int, end: int) -> str:
    whole = cutter.around(tokens, start, end)
    return cutter.text(tokens[whole.start : whole.end])


def split_tiers(candidates: Iterable[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Those that claim equal tokens, and those that claim equal meaning."""
    moved: list[Candidate] = []
    paraphrased: list[Candidate] = []
    for each in candidates:
        tier = getattr(each, "tier", Tier.MOVED)  # it came from elsewhere, and may be anything
        (paraphrased if tier is Tier.PARAPHRASE else moved).append(each)
    return moved, paraphrased
