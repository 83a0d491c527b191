"""The contracts of the backends that cache KV: the scheduler's, and the inspector's.

The scheduler asks for a lease, grows it, publishes through it and releases it. It never sees a
tree node, a hash or a donor: those stay behind the lease. The inspector shows a cache to people
and to tests, and changes nothing. All backends pass one conformance suite (tests/prefix).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvweave.config import FuzzyConfig
from kvweave.kv.pool import IntArray, PagePool
from kvweave.prefix.events import KVEvent
from kvweave.prefix.eviction import Key
from kvweave.prefix.lease import Lease, Namespace, RequestView


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

    declined: Mapping[str, int] = field(default_factory=dict)
    """Declined proposals of other words, by the kind of reason (a `Declined.kind`)."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Calls of the provider by how they ended, and its proposals."""
    provider: Mapping[str, float] = field(default_factory=dict)
    """The provider's own figures, at most about a second of prompts old."""


@dataclass(frozen=True, slots=True)
class NotReused:
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


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node: `length` tokens from position `start` on. A root has none, and no parent."""

    order: int
    """Its number, as plans name donors."""
    parent: int | None
    namespace: Namespace
    start: int
    length: int
    head: IntArray
    locks: int
    hits: int
    idle: int
    """How many paths were used since this one was."""
    children: int
    """How many it has, shown or not."""
    goes: int | None
    """Its place in the queue for eviction, 1 first; None if far behind, or not to be evicted."""
    prompts: tuple[str, ...]
    """Request ids of those asked about that read from it, oldest first."""


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """Nodes, parents before children, the most recently used first; and sums over all nodes."""

    nodes: tuple[NodeSnapshot, ...]
    page_size: int
    cached_pages: int
    evictable_pages: int


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
    def why_not_reused(
        self, view: RequestView, exact: int, start: int, length: int, donor_start: int
    ) -> NotReused | None:
        """Why a run of equal tokens does not serve `view`, whose first `exact` tokens are served.

        The run has `length` tokens, at `start` of the prompt and `donor_start` of a cached path.
        None if nothing speaks against it.
        """

    @abstractmethod
    def check(self, leases: Iterable[Lease]) -> None:
        """Prove that pages, owners and structure add up, given all live leases.

        IntegrityError where they do not.
        """


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Options of backends. `eviction` is lru, lfu, slru or priority. At most `retention_share` of
    the pool is kept for requests with `retain_seconds`.

    `fuzzy` is for the backends that reuse more than exact prefixes; `decode` (token ids to text,
    special tokens spelled out; from any thread) for those that look at what a prompt says.
    """

    eviction: str = "lru"
    retention_share: float = 0.0
    events: bool = False
    wait_for_pending: bool = True
    fuzzy: FuzzyConfig | None = None
    decode: Callable[[IntArray], str] | None = None


class PrefixCache(ABC):
    """Exact reuse of KV at a common prefix; backends may serve more behind it.

    Rules for all backends:
    - A match never covers the last token: at least one is computed, never into a shared page.
    - `match` has no visible effect, not even on recency.
    - Every page in a lease has that lease as an owner; every page kept has the cache as one.
    - An operation that raises has changed nothing, and may be tried again. Only `grow` may have
      evicted by then.
    """

    pool: PagePool
    """Where its pages come from; read its size and its free pages only."""

    @property
    @abstractmethod
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    @abstractmethod
    def inspector(self) -> CacheInspector:
        """What statistics, the explorer and checks read."""

    @abstractmethod
    def match(self, view: RequestView) -> int:
        """Tokens of exact prefix that `lease` would give: full pages, at most len(tokens) - 1."""

    @abstractmethod
    def lease(self, view: RequestView) -> Lease:
        """Lock the longest exact prefix, share its pages, and plan the rest.

        The lease's pages cover the served positions only (all of them, spans included, which are
        realized here). Never fails for lack of room: then it serves less.
        """

    @abstractmethod
    def publish(self, lease: Lease, tokens: IntArray, computed: int) -> None:
        """Keep the full pages of `tokens[:computed]` (confirmed KV), as far as they may be shared.

        Pages that the cache already has converge: `lease.pages` then names the cache's, and the
        duplicates are dropped. Publishing the same progress twice changes nothing. `tokens` may be
        longer than `computed`; it begins with the view's tokens.
        """

    def retain(self, lease: Lease, tokens: IntArray, computed: int) -> None:  # noqa: B027
        """The lease's request has ended with `tokens[:computed]` computed; release follows.

        A backend may keep KV of it that is of use to a later request of the lease's session.
        """

    def close_session(self, namespace: Namespace, session: str) -> int:
        """Forget what was retained for a session; returns how many tokens."""
        return 0

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Unlock and give every page back; the lease is empty afterwards. Twice is harmless."""

    @abstractmethod
    def eviction_key(self, priority: int) -> Key:
        """The eviction key that an entry of `priority` would get now."""

    @abstractmethod
    def evict(self, pages: int, before: Key | None = None) -> int:
        """Free at least `pages` pages if unlocked ones suffice; returns how many were freed.

        With `before`, an `eviction_key` of earlier, only pages with a smaller key are evicted:
        pages used since then, or worth more, stay.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget everything. Only without live leases; else IntegrityError."""

    @property
    @abstractmethod
    def evictable_pages(self) -> int:
        """Pages that `evict` could free now."""

    def pending_prefix(self, view: RequestView, matched: int) -> int:
        """Tokens of `view`'s exact prefix that requests now computing will publish.

        0, or more than `matched`: then a waiting request should wait for the one that computes
        it. Backends may also count tokens that are reusable outside the prefix.
        """
        return 0

    def most_shared(self, view: RequestView, matched: int) -> int:
        """At most how many tokens behind the first `matched` a lease might read in pages that are
        there already, so that it needs none for them; found without a search."""
        return 0

    def continuation(self, lease: Lease, tokens: IntArray, most: int) -> IntArray:
        """What cached text of the lease's namespace says after `tokens`, up to `most` tokens.

        `tokens` are the request's, as in `publish`. A copy; empty if no text goes on from there.
        """
        return tokens[:0]

    def take_events(self) -> list[KVEvent]:
        """Events since the last call (empty unless options.events)."""
        return []

    @abstractmethod
    def grow(self, lease: Lease, tokens: int, before: Key | None = None) -> bool:
        """Give pages for positions below `tokens`; all or nothing.

        Evicts if need be; with `before`, no more than `evict` then may.
        """

    @abstractmethod
    def record(self, lease: Lease) -> None:
        """Count this request's hits; the scheduler calls it once, at first admission."""
