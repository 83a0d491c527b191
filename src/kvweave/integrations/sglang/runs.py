"""The runs of tokens that SGLang is to be lent, in whole pages without a gap, and counts of them.

A run directly behind the exact prefix comes in with it, as a host hit. Every other run needs a
prefill chunk that ends where the run begins:

    | exact | fresh: chunk 1 | run: lent | fresh: chunk 2 | run: lent | fresh: chunk 3 |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from kvweave.fuzzy.provider import Candidate
from kvweave.integrations.sglang.checks import PluginConfig
from kvweave.integrations.sglang.mirror import Piece


class Run(NamedTuple):
    """Positions `start` to `end` of a prompt, served by pieces that follow each other."""

    pieces: tuple[Candidate, ...]

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    @property
    def length(self) -> int:
        return self.end - self.start

    def between(self, start: int, end: int) -> Run | None:
        """The part of the run within these positions; None if there is none."""
        kept = tuple(
            piece.part(max(piece.start, start), min(piece.end, end))
            for piece in self.pieces
            if piece.start < end and piece.end > start
        )
        return Run(kept) if kept else None


def runs_of(
    pieces: Iterable[Piece],
    *,
    exact: int,
    length: int,
    limit: int | None,
    page_size: int,
    config: PluginConfig,
    chunked: bool,
) -> list[Run]:
    """The runs to lend to a prompt of `length` tokens, in order.

    `pieces` are the planner's, `exact` is a multiple of `page_size`. No run reaches position
    `limit`. `chunked`: chunks may be ended for runs; else there is one at most, directly behind the
    exact prefix, and nothing of it is computed again, since that would have to be computed first.
    """
    size, served, runs = page_size, 0, []
    spans = [_computed_anew(piece, config.refresh_tokens if chunked else 0) for piece in pieces]
    for run in _joined(spans):
        end = run.end if limit is None else min(run.end, limit)
        kept = run.between(-(-run.start // size) * size, end // size * size)
        if kept is None or (kept.start > exact and not chunked):
            continue
        if kept.start == exact or kept.length >= config.min_chunk_span:
            runs.append(kept)
            served += kept.length
    return runs if served >= config.min_reuse_ratio * length else []


def _computed_anew(piece: Piece, tokens: int) -> Candidate:
    """The piece without its first tokens, half of it at most, if the text before it changed."""
    span = piece.span
    head = 0 if piece.continues else min(tokens, span.length // 2)
    return span.part(span.start + head, span.end)


def _joined(spans: Iterable[Candidate]) -> list[Run]:
    runs: list[Run] = []
    for span in spans:
        if runs and runs[-1].end == span.start:
            runs[-1] = Run((*runs[-1].pieces, span))
        else:
            runs.append(Run((span,)))
    return runs


NAMES = {
    "lent_requests": "Requests that were lent moved text; again if they were retracted meanwhile.",
    "lent_runs": "Runs of tokens that were lent.",
    "lent_tokens": "Tokens that were lent.",
    "gone": "Donors that SGLang had evicted when they were to be used.",
    "no_room": "Runs that were computed because the pool had no room for them.",
    "failed": "Runs that were computed because copying them failed.",
}


class Counts:
    """Counters since the start, by the names in `NAMES`."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(NAMES, 0)
        self._exported: dict[str, Any] = {}

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def add(self, name: str, by: int = 1) -> None:
        """Count `by` more."""
        self._values[name] += by
        if name in self._exported:
            self._exported[name].inc(by)

    def as_dict(self) -> dict[str, int]:
        """A copy."""
        return dict(self._values)

    def export(self, model_name: str) -> None:
        """From now on, SGLang's /metrics shows them: `kvweave:fuzzy_lent_tokens_total` and so on.

        SGLang gathers the metrics of its processes through files that prometheus_client writes.
        """
        from prometheus_client import Counter

        for name, meaning in NAMES.items():
            counter = Counter(f"kvweave:fuzzy_{name}", meaning, ["model_name"])
            self._exported[name] = counter.labels(model_name)
