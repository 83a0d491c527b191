"""The planner: chooses the spans to serve from verified runs.

Runs overlap each other and may reach into positions where nothing may be moved. The chosen spans
do not overlap and cover as much as the rules allow, with as few seams as possible.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.provider import Candidate
from kvweave.prefix.contract import NotReused


def plan_spans(
    runs: Iterable[Candidate], length: int, exact: int, config: FuzzyConfig
) -> list[Candidate]:
    """The spans to serve of a prompt of `length` tokens whose first `exact` are served already.

    They are ascending pieces of the given runs, each at least `min_span` long. Left out are the
    exact prefix, the prompt's first `sink_tokens` and last `min_suffix` tokens, and a donor's
    first `sink_tokens`: attention sinks at the first tokens of a context, whose KV differs from
    all other (StreamingLLM, arXiv 2309.17453). Also left out is a run that continues the exact
    prefix into a partly equal page: computing those few tokens keeps the request exact.
    """
    usable = []
    for run in runs:
        if run.start == run.donor_start == 0:
            continue  # the prompt's own prefix
        piece = _usable(run, length, exact, config)
        if piece.length >= config.min_span:
            usable.append(piece)
    pieces = _limited(
        _cover(usable, config.min_span),
        int(config.max_share * length),
        config.min_span,
    )
    served = sum(piece.length for piece in pieces)
    return pieces if served >= config.min_reuse_ratio * length else []


def why_not_planned(
    run: Candidate, length: int, exact: int, config: FuzzyConfig
) -> NotReused | None:
    """The rule by which `plan_spans` serves nothing of `run` alone; None if it serves some."""
    pieces = plan_spans([run], length, exact, config)
    if pieces:
        return None
    shortest, usable = config.min_span, _usable(run, length, exact, config).length
    if run.length < shortest:
        reason = f"it has {run.length} tokens, and --fuzzy-min-span asks for {shortest}"
        return NotReused("min-span", reason)
    if usable < shortest:
        return NotReused(
            "edges",
            f"only {max(usable, 0)} of its tokens lie where text may be moved, fewer than "
            f"--fuzzy-min-span {shortest}: not among either prompt's first "
            f"{config.sink_tokens} tokens, nor this prompt's last {config.min_suffix}",
        )
    if int(config.max_share * length) < shortest:
        reason = f"--fuzzy-max-share {config.max_share:g} leaves no room for a span"
        return NotReused("max-share", reason)
    return NotReused(
        "min-reuse",
        f"it would serve {usable / length:.1%} of the prompt, and --fuzzy-min-reuse-ratio asks "
        f"for {config.min_reuse_ratio:.0%}",
    )


def _usable(run: Candidate, length: int, exact: int, config: FuzzyConfig) -> Candidate:
    """The part of `run` that may be moved, without both texts' edges; maybe below 1 token."""
    sinks = config.sink_tokens
    start = max(run.start, exact, sinks, run.start + sinks - run.donor_start)
    return run.part(start, min(run.end, length - config.min_suffix))


def _cover(runs: list[Candidate], shortest: int) -> list[Candidate]:
    """As few pieces as cover the union of `runs`: at every point, the run that reaches furthest.

    A run that adds less than `shortest` tokens takes the rest from the piece before it if that can
    spare them, and is left out if not.
    """
    runs = sorted(runs, key=lambda run: run.start)
    pieces: list[Candidate] = []
    reached, at = 0, 0
    while at < len(runs):
        reached = max(reached, runs[at].start)
        furthest = runs[at]
        while at < len(runs) and runs[at].start <= reached:
            if runs[at].end > furthest.end:
                furthest = runs[at]
            at += 1
        if furthest.end - reached < shortest and pieces and pieces[-1].end == reached:
            lent = furthest.end - shortest
            if furthest.end <= reached or lent - pieces[-1].start < shortest:
                continue
            pieces[-1] = pieces[-1].part(pieces[-1].start, lent)
            reached = lent
        pieces.append(furthest.part(reached, furthest.end))
        reached = furthest.end
    return pieces


def _limited(pieces: list[Candidate], most: int, shortest: int) -> list[Candidate]:
    """At most `most` tokens of `pieces`, the longest first."""
    kept = []
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        piece = piece.part(piece.start, min(piece.end, piece.start + most))
        if piece.length >= shortest:
            kept.append(piece)
            most -= piece.length
    return sorted(kept, key=lambda piece: piece.start)
