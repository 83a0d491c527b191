"""What a prefix cache shows of itself: statistics, the explorer's views, and checks.

Nothing here changes the cache. The scheduler does not use it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvweave.prefix.lease import Lease, RequestView

if TYPE_CHECKING:
    from kvweave.prefix.tree_snapshot import TreeSnapshot


@dataclass(slots=True)
class CacheStats:
    """Counters since start, and gauges as of now (in tokens unless the name says pages)."""

    requests: int = 0
    query_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    """By tier; counted once per request, when it is first admitted."""
    cached_pages: int = 0
    evictable_pages: int = 0
    evicted_pages: int = 0
    converged_pages: int = 0
    provider: dict[str, float] = field(default_factory=dict)
    """Counters of the provider of reuse beyond the prefix, by name; empty without one."""


@dataclass(frozen=True, slots=True)
class ReuseCounts:
    """Counters of reuse beyond the prefix, since start and by name."""

    refused: Mapping[str, int] = field(default_factory=dict)
    """Refused proposals of other words, by the kind of reason (a `Declined.kind`)."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Calls of the provider by how they ended, and its proposals."""
    provider: Mapping[str, float] = field(default_factory=dict)
    """The provider's own figures, at most about a second of prompts old."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why cached KV of equal text was not lent: the gate's name, and a sentence for people."""

    gate: str
    reason: str


@dataclass(frozen=True, slots=True)
class Declined:
    """Why other words were not lent for tokens `start` to `end` of the request `rid`: the kind is
    what counters call it, the reason a sentence that may quote both texts."""

    rid: str
    start: int
    end: int
    kind: str
    reason: str


class CacheInspector(ABC):
    """Read access to a cache, between two steps of the engine; from `PrefixCache.inspector`."""

    counters: CacheStats
    """As of now, except for the gauges, which `stats` refreshes."""

    @property
    @abstractmethod
    def cached_pages(self) -> int:
        """Pages that the cache itself owns."""

    @abstractmethod
    def stats(self) -> CacheStats:
        """Counters and gauges, as of now."""

    def reuse_counts(self) -> ReuseCounts:
        """Counters of reuse beyond the prefix; cheap, since no provider is asked."""
        return ReuseCounts()

    def tree_snapshot(self, prompts: Sequence[RequestView], most: int) -> TreeSnapshot | None:
        """At most `most` nodes of the tree, and which of `prompts` lie on them; None without one.

        Its cost grows with `most` and `prompts`, not with the tree.
        """
        return None

    def declined(self, rid: str) -> list[Declined]:
        """Proposals of other words for this request that were refused, as far as remembered."""
        return []

    @abstractmethod
    def refusal(
        self, view: RequestView, exact: int, start: int, length: int, donor_start: int
    ) -> Refusal | None:
        """Why a run of equal tokens does not serve `view`, whose first `exact` tokens are served.

        The run has `length` tokens, at `start` of the prompt and `donor_start` of a cached path.
        None if nothing speaks against it.
        """

    @abstractmethod
    def check(self, leases: Iterable[Lease]) -> None:
        """Prove that pages, owners and structure add up, given all live leases.

        IntegrityError where they do not.
        """
