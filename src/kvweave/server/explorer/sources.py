"""Where a prompt's KV came from, as runs: never an object per token."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvweave.prefix.plan import Span, Tier

FRESH = "fresh"
REFRESHED = "refreshed"
SOURCES = (*(tier.value for tier in Tier), REFRESHED, FRESH)
"""Every name that a source can have."""


class SourceRun(NamedTuple):
    """`length` positions from `start` on; `span` is theirs if one covers them."""

    source: str
    start: int
    length: int
    span: Span | None = None

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def donor_start(self) -> int | None:
        """Where the run stands in its donor; an exact prefix stands where it stood."""
        if self.span is not None:
            return self.span.donor_start + self.start - self.span.start
        return self.start if self.source == Tier.EXACT.value else None


def source_runs(
    length: int, exact: int, spans: Sequence[Span], refreshed: Iterable[tuple[int, int]]
) -> list[SourceRun]:
    """Ascending runs that cover `length` positions once. `refreshed` are (start, length)."""
    recomputed = deque((start, start + count) for start, count in refreshed)
    if spans:  # of a second admission, perhaps, while `exact` is always the first one's
        exact = min(exact, spans[0].start)
    runs = [SourceRun(Tier.EXACT.value, 0, exact)]
    reached = exact
    for span in spans:
        runs.append(SourceRun(FRESH, reached, span.start - reached))
        while recomputed and recomputed[0][1] <= span.start:
            recomputed.popleft()
        runs += _within(span, recomputed)
        reached = span.end
    runs.append(SourceRun(FRESH, reached, length - reached))
    return [run for run in runs if run.length > 0]


def _within(span: Span, recomputed: Iterable[tuple[int, int]]) -> Iterator[SourceRun]:
    """The span, cut where it was computed all the same."""
    at = span.start
    for first, last in recomputed:
        if first >= span.end:
            break
        begin, end = max(first, span.start), min(last, span.end)
        yield SourceRun(span.tier.value, at, begin - at, span)
        yield SourceRun(REFRESHED, begin, end - begin, span)
        at = end
    yield SourceRun(span.tier.value, at, span.end - at, span)


def counts(runs: Iterable[SourceRun]) -> dict[str, int]:
    """Tokens by source, every source named."""
    found = dict.fromkeys(SOURCES, 0)
    for run in runs:
        found[run.source] += run.length
    return found
