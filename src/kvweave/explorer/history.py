"""The history of recent prompts: their tokens and the sources of their KV."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Span, Tier
from kvweave.prefix.tree import common_prefix
from kvweave.server.metrics import RequestMetrics

FRESH = "fresh"
REFRESHED = "refreshed"
SOURCES = (*(tier.value for tier in Tier), REFRESHED, FRESH)
"""Every name that a source can have."""


class SourceRun(NamedTuple):
    """`length` positions from `start` on with one source, and the plan's span that covers them."""

    source: str
    start: int
    length: int
    span: Span | None = None

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def donor_start(self) -> int | None:
        """The run's first position in its donor; of an exact prefix, the same position."""
        if self.span is not None:
            return self.span.donor_start + self.start - self.span.start
        return self.start if self.source == Tier.EXACT.value else None


def source_runs(
    length: int, exact: int, spans: Sequence[Span], refreshed: Iterable[tuple[int, int]]
) -> list[SourceRun]:
    """Ascending runs that cover `length` positions once. `refreshed` are (start, length)."""
    recomputed = deque((start, start + count) for start, count in refreshed)
    if spans:  # perhaps of a second admission, while `exact` is the first one's
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
    """The span, split where parts of it were recomputed."""
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
    """Tokens by source, with 0 for absent ones."""
    found = dict.fromkeys(SOURCES, 0)
    for run in runs:
        found[run.source] += run.length
    return found


MOST_PROMPTS = 256
MOST_TOKENS = 2**20
"""Prompt and answer tokens kept, four bytes each."""


@dataclass(frozen=True)
class Record:
    """One prompt that has ended. Tokens are int32; times are seconds, `arrived` since the epoch."""

    number: int
    """Counted from 1; the explorer's name for the prompt."""
    rid: str
    endpoint: str
    salt: str | None
    fuzzy: bool
    prompt_length: int
    tokens: IntArray
    """The prompt and its first answer: other prompts may have reused both."""
    exact: int
    spans: tuple[Span, ...]
    refreshed: tuple[tuple[int, int], ...]
    arrived: float
    first_token: float | None
    """From arrival, as `total`."""
    total: float
    outcome: str
    begins_at: int = 0
    """The first token that the prompt before did not have there; 0 if it had them all."""

    def runs(self) -> list[SourceRun]:
        """The sources of the prompt's KV, in order of position."""
        return source_runs(self.prompt_length, self.exact, self.spans, self.refreshed)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Prompt tokens by source."""
        return counts(self.runs())

    @property
    def prompt(self) -> IntArray:
        return self.tokens[: self.prompt_length]

    @property
    def answer(self) -> IntArray:
        return self.tokens[self.prompt_length :]

    @property
    def lends_up_to(self) -> int:
        """The first position that is approximate or depends on one; never reused from there on."""
        return self.spans[0].start if self.spans else len(self.tokens)


class History:
    """Records by number, oldest first; bounded by number of prompts and of tokens."""

    def __init__(self, most_prompts: int = MOST_PROMPTS, most_tokens: int = MOST_TOKENS) -> None:
        self.started = time.time()
        """Identifies this history: after a restart, the same numbers mean other prompts."""
        self._records: deque[Record] = deque()
        self._most_prompts = most_prompts
        self._most_tokens = most_tokens
        self._tokens = 0
        self._added = 0

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def oldest(self) -> int:
        """The lowest number that is kept."""
        return self._records[0].number if self._records else self._added + 1

    def get(self, number: int) -> Record | None:
        """The record with this number, if it is still kept."""
        place = number - self.oldest
        return self._records[place] if 0 <= place < len(self._records) else None

    def before(self, record: Record) -> list[Record]:
        """Records that arrived earlier, newest first."""
        earlier = [other for other in self._records if other.arrived < record.arrived]
        return sorted(earlier, key=lambda other: -other.arrived)

    def add(self, metrics: RequestMetrics) -> None:
        """Add a prompt that has just ended."""
        self._added += 1
        record = _record(self._added, metrics, self._records[-1] if self._records else None)
        self._records.append(record)
        self._tokens += len(record.tokens)
        while len(self._records) > self._most_prompts or (
            self._tokens > self._most_tokens and len(self._records) > 1
        ):
            self._tokens -= len(self._records.popleft().tokens)


def _record(number: int, metrics: RequestMetrics, before: Record | None) -> Record:
    request = metrics.request
    tokens = np.array((*request.prompt_ids, *metrics.answer), np.int32)
    prompt = tokens[: len(request.prompt_ids)]
    shared = 0 if before is None else common_prefix(prompt, before.prompt)
    return Record(
        number=number,
        rid=request.rid,
        endpoint=metrics.endpoint,
        salt=request.cache_salt,
        fuzzy=request.fuzzy,
        prompt_length=len(request.prompt_ids),
        tokens=tokens,
        exact=metrics.usage.cached_tokens,
        spans=metrics.plan,
        refreshed=metrics.refreshed,
        arrived=metrics.arrived,
        first_token=metrics.first_token_seconds,
        total=metrics.total_seconds,
        outcome=metrics.outcome,
        begins_at=shared if shared < len(prompt) else 0,
    )
