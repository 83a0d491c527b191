"""Prompt tokens by source over the last hour, in slices of ten seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

SLICE_SECONDS = 10
SLICES = 360


@dataclass(slots=True)
class Slice:
    """What ended in the ten seconds from `start` (since the epoch) on."""

    start: int
    prompts: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """By source."""


class Timeline:
    """Only slices in which something ended take space."""

    def __init__(self) -> None:
        self._slices: deque[Slice] = deque(maxlen=SLICES)

    def add(self, now: float, tokens: Mapping[str, int]) -> None:
        """A prompt ended `now` whose `tokens` came from these sources."""
        start = int(now) // SLICE_SECONDS * SLICE_SECONDS
        if not self._slices or self._slices[-1].start < start:
            self._slices.append(Slice(start))
        last = self._slices[-1]
        last.prompts += 1
        for source, count in tokens.items():
            last.tokens[source] = last.tokens.get(source, 0) + count

    def since(self, earliest: float) -> list[Slice]:
        """The slices that begin at `earliest` or later, in order."""
        return [part for part in self._slices if part.start >= earliest]
