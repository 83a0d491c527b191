"""From runs that could be served to the ones that are: which, how much of each, or none.

The runs are true (verified token by token), overlap each other, and may reach into places where
nothing may be moved. What comes out never overlaps and covers as much as the rules allow, with as
few seams as that takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.provider import Candidate
from kvweave.prefix.contract import Refusal


def plan_spans(
    runs: Iterable[Candidate], length: int, exact: int, config: FuzzyConfig
) -> list[Candidate]:
    """What to serve of a prompt of `length` tokens whose first `exact` are served already.

    Ascending pieces of the given runs, each at least `min_span` long. Never among them: the
    exact prefix, the prompt's first `sink_tokens` and last `min_suffix` tokens, and a
    donor's first `sink_tokens`, since a model leans on the very first tokens of its context
    and their KV is like no other (StreamingLLM, arXiv 2309.17453). Nor is what goes on with the
    exact prefix into a page that is only partly equal: computing those few tokens keeps the
    request exact, and its pages fit for everyone.
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


def refusal(run: Candidate, length: int, exact: int, config: FuzzyConfig) -> Refusal | None:
    """Which rule keeps `plan_spans` from serving anything of `run` alone; None if it would."""
    pieces = plan_spans([run], length, exact, config)
    if pieces:
        return None
    shortest, usable = config.min_span, _usable(run, length, exact, config).length
    if run.length < shortest:
        reason = f"it has {run.length} tokens, and --fuzzy-min-span asks for {shortest}"
        return Refusal("min-span", reason)
    if usable < shortest:
        return Refusal(
            "edges",
            f"only {max(usable, 0)} of its tokens lie where text may be moved, fewer than "
            f"--fuzzy-min-span {shortest}: not among either prompt's first "
            f"{config.sink_tokens} tokens, nor this prompt's last {config.min_suffix}",
        )
    if int(config.max_share * length) < shortest:
        reason = f"--fuzzy-max-share {config.max_share:g} leaves no room for a span"
        return Refusal("max-share", reason)
    return Refusal(
        "min-reuse",
        f"it would serve {usable / length:.1%} of the prompt, and --fuzzy-min-reuse-ratio asks "
        f"for {config.min_reuse_ratio:.0%}",
    )


def _usable(run: Candidate, length: int, exact: int, config: FuzzyConfig) -> Candidate:
    """The part of `run` that lies where text may be moved from and to; its length may be below 1.

    A donor's first tokens are never lent, the prompt's own first and last ones never served.
    """
    sinks = config.sink_tokens
    start = max(run.start, exact, sinks, run.start + sinks - run.donor_start)
    return _cut(run, start, min(run.end, length - config.min_suffix))


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
            pieces[-1] = _cut(pieces[-1], pieces[-1].start, lent)
            reached = lent
        pieces.append(_cut(furthest, reached, furthest.end))
        reached = furthest.end
    return pieces


def _limited(pieces: list[Candidate], most: int, shortest: int) -> list[Candidate]:
    """At most `most` tokens of `pieces`, the longest first."""
    kept = []
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        piece = _cut(piece, piece.start, min(piece.end, piece.start + most))
        if piece.length >= shortest:
            kept.append(piece)
            most -= piece.length
    return sorted(kept, key=lambda piece: piece.start)


def _cut(run: Candidate, start: int, end: int) -> Candidate:
    """The part of `run` that serves positions `start` to `end` of the prompt."""
    if (start, end) == (run.start, run.end):
        return run
    return replace(
        run, start=start, length=end - start, donor_start=run.donor_start + start - run.start
    )
