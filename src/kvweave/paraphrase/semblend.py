"""The provider `semblend`: donors found by the package semblend, verified like all others.

semblend's adapter for SGLang is called as SGLang calls it. It is given tokens, text and slot
numbers of each donor, and answers with target positions and slot numbers. Here a slot number
encodes a donor and a position in it, which lead to a page of the live tree. The cache compares
every claim: a moved span is served only where the tokens are equal, a paraphrase only where the
facts are.

A paraphrase arrives as one piece, position by position, from the exact prefix to the prompt's end.
It is split where sentences end in both texts at the same position: each sentence is judged by
itself, no sentence is cut, and the question is left out.
"""

from __future__ import annotations

import importlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvweave.config import FuzzyConfig
from kvweave.errors import ConfigError, extra
from kvweave.fuzzy.matcher import common_suffix
from kvweave.fuzzy.provider import Candidate, Donors, FuzzyMatchProvider, PublishedRun
from kvweave.kv.pool import IntArray
from kvweave.paraphrase.gate import Cutter, question_of
from kvweave.prefix.hash_index import namespace_seed
from kvweave.prefix.lease import Namespace, RequestView, Tier
from kvweave.prefix.tree import common_prefix

_log = logging.getLogger(__name__)

OLDEST, BEFORE = (0, 3, 20), (0, 4)
"""Versions whose adapter has the interface used here: from the first to below the second."""

_ADVICE = extra("semblend")
_NO_EMBEDDER = f"{_ADVICE}, and have the model: hf download sentence-transformers/all-MiniLM-L6-v2"
_MOST_DONORS = 1024
_GROWTH = 1.5
"""A path that generation extends is registered again when it is this much longer."""
_SHIFT = 32
"""A slot number is (donor number << _SHIFT) + position."""
_VERIFIED = "paraphrase_verified"
"""semblend's name for a paraphrase whose facts it has compared."""


@dataclass(frozen=True, slots=True)
class _Donor:
    """A registered path: its last page, and its tokens from position 0 on."""

    page: int
    tokens: IntArray


class SemblendProvider(FuzzyMatchProvider):
    """Registers each prompt with semblend when its last page is published, and asks it for donors.

    Registering decodes and embeds the whole path, so it is not done page by page. Not bounded: a
    look-up may take longer than any time limit.
    """

    @staticmethod
    def check_installed(config: FuzzyConfig) -> None:
        """ConfigError if the package is missing or of another version."""
        try:
            found = version("semblend")
        except PackageNotFoundError:
            raise ConfigError([f"--fuzzy-provider semblend is not installed: {_ADVICE}"]) from None
        if not OLDEST <= _numbers(found) < BEFORE:
            window = f"from {_dotted(OLDEST)} to below {_dotted(BEFORE)}"
            raise ConfigError(
                [f"--fuzzy-provider semblend is for {window}, not {found}: {_ADVICE}"]
            )

    def __init__(self, donors: Donors, config: FuzzyConfig, adapter: Any = None) -> None:
        """ConfigError if the package is missing, of another version, or does not start."""
        super().__init__(donors, config)
        if donors.decode is None:
            raise ConfigError(["--fuzzy-provider semblend reads text, and here is no tokenizer"])
        self._decode = donors.decode
        self._cutter = Cutter(donors.decode)
        self._adapter = _made(config) if adapter is None else adapter
        self._donors: OrderedDict[str, _Donor] = OrderedDict()
        self._by_page: dict[int, set[str]] = {}
        self._extended: dict[str, str] = {}
        """By request: the name under which its path is registered."""
        self._names = 0
        self._counts = dict.fromkeys(("unknown_donor", "unreadable", "registered"), 0)

    def match(self, view: RequestView, exact: int) -> Sequence[Candidate]:
        if not view.semantic:
            return ()  # semblend compares meaning only
        tokens = view.tokens.tolist()
        result = self._adapter.match(
            tokens,
            exact,
            prompt_text=self._decode(view.tokens[exact:]),
            extra_key=_key(view.namespace),
        )
        if result is None:
            return ()
        try:
            return list(self._candidates(result, exact, view))
        except (TypeError, ValueError, AttributeError, KeyError, IndexError):
            self._counts["unreadable"] += 1
            _log.debug("semblend's answer makes no sense", exc_info=True)
            return ()

    def on_published(self, run: PublishedRun) -> None:
        if not (run.semantic and run.complete):
            return
        earlier = self._extended.get(run.rid, "")
        known = self._donors.get(earlier)
        if known is not None and run.start + len(run.tokens) < _GROWTH * len(known.tokens):
            return
        page = int(run.pages[-1])
        tokens = self.donors.tokens(page)
        self._forget(earlier)
        self._names += 1
        name = str(self._names)
        kept = self._adapter.register_donor(
            name,
            tokens.tolist(),
            (self._names << _SHIFT) + np.arange(len(tokens), dtype=np.int64),
            0,
            len(tokens),
            prompt_text=self._decode(tokens),
            extra_key=_key(run.namespace),
            cache_salt=run.namespace.salt,
        )
        if not kept:
            return
        self._counts["registered"] += 1
        self._donors[name] = _Donor(page, tokens)
        self._by_page.setdefault(page, set()).add(name)
        self._extended[run.rid] = name
        while len(self._donors) > _MOST_DONORS:
            self._forget(next(iter(self._donors)))

    def on_evicted(self, pages: IntArray) -> None:
        for page in pages.tolist():
            for name in list(self._by_page.get(page, ())):
                self._forget(name)

    def clear(self) -> None:
        self._donors.clear()
        self._by_page.clear()
        self._extended.clear()
        self._adapter.clear()

    def stats(self) -> Mapping[str, float]:
        return {"donors": len(self._donors), **self._counts}

    def _forget(self, name: str) -> None:
        donor = self._donors.pop(name, None)
        if donor is None:
            return
        names = self._by_page[donor.page]
        names.discard(name)
        if not names:
            del self._by_page[donor.page]
        for rid in [rid for rid, known in self._extended.items() if known == name]:
            del self._extended[rid]

    def _candidates(self, result: Any, exact: int, view: RequestView) -> Iterator[Candidate]:
        """semblend's result as candidates: its segments if there are any, else its one span.

        semblend counts target positions from the end of the exact prefix.
        """
        signals = getattr(result, "quality_signals", None)
        similarity = float(getattr(signals, "cosine_similarity", 0.0))
        verified = getattr(signals, "confidence_tier", "") == _VERIFIED
        if result.segments:
            for segment in result.segments:
                targets = exact + _integers(segment.target_positions)
                for run in _runs(targets, _integers(segment.donor_kv_indices)):
                    yield from self._claim(*run, len(view.tokens))
            return
        slots = _integers(result.kv_cache_indices)[: int(result.cached_token_count)]
        for run in _runs(exact + np.arange(len(slots)), slots):
            for claim in self._claim(*run, len(view.tokens)):
                if verified:
                    yield from self._sentences(view, exact, claim, similarity)
                else:
                    yield claim

    def _claim(self, start: int, slot: int, count: int, length: int) -> Iterator[Candidate]:
        """The run within the bounds of both prompts; nothing if its donor is gone."""
        number, begin = divmod(slot, 1 << _SHIFT)
        donor = self._donors.get(str(number))
        if donor is None:
            self._counts["unknown_donor"] += 1
            return
        count = min(count, length - start, len(donor.tokens) - begin)
        if count >= 1 and start >= 0:
            yield Candidate(start=start, length=count, page=donor.page, donor_start=begin)

    def _sentences(
        self, view: RequestView, exact: int, claim: Candidate, similarity: float
    ) -> Iterator[Candidate]:
        """A claimed paraphrase, sentence by sentence: differing tokens, and equal ones as moved."""
        sinks = self.config.sink_tokens
        ours = view.tokens[claim.start : claim.end]
        theirs = self.donors.tokens(claim.page, claim.donor_start)[: claim.length]
        edges = [0, *sorted(self._ends(ours) & self._ends(theirs))]
        for first, last in pairwise(edges):
            here, there = ours[first:last], theirs[first:last]
            before = common_prefix(here, there)
            if before == last - first:
                begin, end, tier = first, last, Tier.MOVED
            else:
                begin = first + before
                end = last - common_suffix(here[before:], there[before:])
                tier = Tier.PARAPHRASE
            start, donor_start = claim.start + begin, claim.donor_start + begin
            lent = min(start, donor_start) >= sinks and start >= exact
            if lent and claim.start + end <= question_of(view):
                yield replace(
                    claim,
                    start=start,
                    length=end - begin,
                    donor_start=donor_start,
                    tier=tier,
                    similarity=similarity,
                    donor_tokens=theirs[begin:end],
                )

    def _ends(self, tokens: IntArray) -> set[int]:
        return {passage.end for passage in self._cutter.cut(tokens)[:-1]}


def _integers(values: Any) -> npt.NDArray[np.int64]:
    return np.asarray(values, np.int64).ravel()


def _runs(
    targets: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
) -> Iterator[tuple[int, int, int]]:
    """Runs in which both increase by one: (target, slot, length)."""
    if len(targets) != len(slots):
        raise ValueError(f"{len(targets)} positions cannot come from {len(slots)}")
    breaks = np.flatnonzero((np.diff(targets) != 1) | (np.diff(slots) != 1)) + 1
    for first, last in pairwise([0, *breaks.tolist(), len(targets)]):
        if last > first:
            yield int(targets[first]), int(slots[first]), last - first


def _key(namespace: Namespace) -> str:
    """A hash of model, adapter and salt, by which semblend separates donors."""
    return f"{namespace_seed(namespace):016x}"


def _made(config: FuzzyConfig) -> Any:
    SemblendProvider.check_installed(config)
    sglang = importlib.import_module("semblend.integration.sglang.provider")
    settings = importlib.import_module("semblend.integration.sglang.config")
    adapter = sglang.SemBlendProviderAdapter(
        settings.SemBlendProviderConfig(
            embedding_use_gpu=False,  # which would ask for a GPU; where there is one, it is found
            min_match_length=config.min_span,
            min_reuse_ratio=config.min_reuse_ratio,
            max_entries=_MOST_DONORS,
            multi_segment_emission=True,
            sink_protect_tokens=config.sink_tokens,
            donor_sink_protect_tokens=config.sink_tokens,
            paraphrase_min_similarity=config.semantic_threshold,
        )
    )
    # Its embedder loads at the first question, which takes longer than a prompt may wait; and if
    # it cannot load, semblend finds nothing without an error.
    embed = getattr(adapter, "_embed", None)
    if embed is not None and embed([], "It loads.") is None:
        raise ConfigError([f"--fuzzy-provider semblend has nothing to embed with: {_NO_EMBEDDER}"])
    return adapter


def _numbers(found: str) -> tuple[int, ...]:
    parts = found.split("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
