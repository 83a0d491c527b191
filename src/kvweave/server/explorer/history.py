"""The last prompts and what became of them: bounded, and written once per prompt, at its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvweave.kv.pool import IntArray
from kvweave.prefix.plan import Span
from kvweave.server.explorer.sources import SourceRun, counts, source_runs
from kvweave.server.explorer.timeline import Timeline
from kvweave.server.trace import Trace

MOST_PROMPTS = 256
MOST_TOKENS = 2**20
"""Of prompts and answers together, four bytes each."""


@dataclass(frozen=True)
class Record:
    """One prompt that has ended. Tokens are int32; times are seconds, `arrived` since the epoch."""

    number: int
    """Counted from 1; what the explorer calls it."""
    rid: str
    endpoint: str
    salt: str | None
    fuzzy: bool
    prompt_length: int
    tokens: IntArray
    """The prompt and its first answer: what others may have been lent."""
    exact: int
    spans: tuple[Span, ...]
    refreshed: tuple[tuple[int, int], ...]
    arrived: float
    first_token: float | None
    """From arrival on, as `total`."""
    total: float
    outcome: str

    def runs(self) -> list[SourceRun]:
        """Where the prompt's KV came from, in order."""
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
        """Positions from here on are approximate, or depend on what is: nobody is served them."""
        return self.spans[0].start if self.spans else len(self.tokens)


class History:
    """Records by number, oldest first; the oldest go when there are too many, or too long ones."""

    def __init__(self, most_prompts: int = MOST_PROMPTS, most_tokens: int = MOST_TOKENS) -> None:
        self.started = time.time()
        """Tells two histories apart whose numbers mean different prompts."""
        self.timeline = Timeline()
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
        """Numbers below are forgotten."""
        return self._records[0].number if self._records else self._added + 1

    def get(self, number: int) -> Record | None:
        """The record with this number, if it is still kept."""
        place = number - self.oldest
        return self._records[place] if 0 <= place < len(self._records) else None

    def before(self, record: Record) -> list[Record]:
        """Those that arrived earlier, newest first."""
        earlier = [other for other in self._records if other.arrived < record.arrived]
        return sorted(earlier, key=lambda other: -other.arrived)

    def add(self, trace: Trace) -> None:
        """Remember a prompt that has just ended."""
        self._added += 1
        record = _record(self._added, trace)
        self._records.append(record)
        self._tokens += len(record.tokens)
        while len(self._records) > self._most_prompts or (
            self._tokens > self._most_tokens and len(self._records) > 1
        ):
            self._tokens -= len(self._records.popleft().tokens)
        # What never got a token may never have been looked up.
        if record.first_token is not None:
            self.timeline.add(time.time(), record.counts)


def _record(number: int, trace: Trace) -> Record:
    request = trace.request
    return Record(
        number=number,
        rid=request.rid,
        endpoint=trace.endpoint,
        salt=request.cache_salt,
        fuzzy=request.fuzzy,
        prompt_length=len(request.prompt_ids),
        tokens=np.array((*request.prompt_ids, *trace.answer), np.int32),
        exact=trace.usage.cached_tokens,
        spans=trace.plan,
        refreshed=trace.refreshed,
        arrived=trace.arrived,
        first_token=trace.first_token_seconds,
        total=trace.total_seconds,
        outcome=trace.outcome,
    )
