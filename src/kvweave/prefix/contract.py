"""The contract between the scheduler and whatever remembers KV.

The scheduler asks for a lease, grows it, publishes through it and releases it. It never sees a
tree node, a hash or a donor: those stay behind the lease. All backends pass one conformance suite
(tests/prefix). No torch here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kvweave.config import FuzzyConfig
from kvweave.kv.journal import atomic
from kvweave.kv.pool import IntArray, PagePool
from kvweave.prefix.events import KVEvent
from kvweave.prefix.eviction import Key
from kvweave.prefix.lease import Lease, Namespace, RequestView

if TYPE_CHECKING:
    from kvweave.prefix.tree_snapshot import TreeSnapshot


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What backends can be told. `eviction` is lru, lfu, slru or priority.

    `fuzzy` is for the backends that reuse more than exact prefixes; `decode` (token ids to text,
    special tokens spelled out; from any thread) for those that look at what a prompt says.
    """

    eviction: str = "lru"
    events: bool = False
    wait_for_pending: bool = True
    fuzzy: FuzzyConfig | None = None
    decode: Callable[[IntArray], str] | None = None


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
    """What the provider of reuse beyond the prefix counts, by name; empty without one."""


@dataclass(frozen=True, slots=True)
class ReuseCounts:
    """What is counted of reuse beyond the prefix, since start and by name."""

    refused: Mapping[str, int] = field(default_factory=dict)
    """Proposals of other words that were not served, by the kind of reason (a `Declined.kind`)."""
    events: Mapping[str, int] = field(default_factory=dict)
    """What became of asking whoever proposes, and of its proposals."""
    provider: Mapping[str, float] = field(default_factory=dict)
    """What that one tells of itself, as of a prompt a second ago, or of the last one."""


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


class PrefixCache(ABC):
    """Exact reuse of KV at a common prefix, and the base of what goes beyond it.

    Rules for all backends:
    - A match never covers the last token: at least one is computed, never into a shared page.
    - `match` changes nothing that anyone could see, not even recency.
    - Every page in a lease has that lease as an owner; every page kept has the cache as one.
    - An operation that raises has changed nothing, and may be tried again. Only `grow` may have
      evicted by then.
    """

    name: ClassVar[str]

    def __init__(self, pool: PagePool, options: CacheOptions) -> None:
        self.pool = pool
        self.options = options
        self.counters = CacheStats()
        self._journal = pool.journal

    @property
    def page_size(self) -> int:
        return self.pool.page_size

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
        """Where, in the order of eviction, a new entry of this moment and `priority` stands."""

    @abstractmethod
    def evict(self, pages: int, before: Key | None = None) -> int:
        """Free at least `pages` pages if unlocked ones suffice; returns how many were freed.

        With `before`, a `standing` of earlier, only those that go before it: whatever was used
        since then, or is worth more, stays.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget everything. Only without live leases; else IntegrityError."""

    @abstractmethod
    def resident(self) -> Iterable[IntArray]:
        """The pages that the cache itself owns, in any order and grouping, each once."""

    @abstractmethod
    def check_structure(self) -> None:
        """Recompute the backend's own sums from scratch; IntegrityError where they differ."""

    @property
    @abstractmethod
    def evictable_pages(self) -> int:
        """Pages that `evict` could free now."""

    @property
    @abstractmethod
    def cached_pages(self) -> int:
        """Pages that the cache itself owns."""

    def pending_prefix(self, view: RequestView, matched: int) -> int:
        """Tokens of `view`'s exact prefix that requests now computing will publish.

        0, or more than `matched`: then a waiting request had better wait for its producer. What
        will be of use elsewhere than in the prefix may be counted as if it stood there.
        """
        return 0

    def grow(self, lease: Lease, tokens: int, before: Key | None = None) -> bool:
        """Give pages for positions below `tokens`; all or nothing.

        Evicts if need be; with `before`, no more than `evict` then may.
        """
        need = -(-tokens // self.page_size) - len(lease.pages)
        if need <= 0:
            return True
        short = need - self.pool.num_free
        if short > 0:
            if short > self.evictable_pages:
                return False
            self.evict(short, before)
        return self._append(lease, need)

    @atomic
    def _append(self, lease: Lease, need: int) -> bool:
        pages = self.pool.alloc(need)
        if pages is None:
            return False
        lease.keep(self._journal)
        lease.append(pages)
        return True

    @atomic
    def record(self, lease: Lease) -> None:
        """Count this request's hits; the scheduler calls it once, at first admission."""
        counters, plan = self.counters, lease.plan
        hits = dict(counters.hit_tokens)
        hits["exact"] = hits.get("exact", 0) + plan.exact
        for tier in {span.tier for span in plan.spans}:
            hits[tier.value] = hits.get(tier.value, 0) + plan.served_by(tier)
        self._journal.fields(counters, "requests", "query_tokens", "hit_tokens")
        counters.requests += 1
        counters.query_tokens += plan.length
        counters.hit_tokens = hits
        self._touch(lease)

    @abstractmethod
    def _touch(self, lease: Lease) -> None:
        """For backends: what serves `lease` was hit once."""

    def reuse_counts(self) -> ReuseCounts:
        """Counters of reuse beyond the prefix, at hand at once: nobody is asked."""
        return ReuseCounts()

    def stats(self) -> CacheStats:
        """Counters and gauges, as of now."""
        self.counters.evictable_pages = self.evictable_pages
        self.counters.cached_pages = self.cached_pages
        return self.counters

    def take_events(self) -> list[KVEvent]:
        """Events since the last call (empty unless options.events)."""
        return []

    # For people who look in; nothing here changes anything.

    def tree_snapshot(self, prompts: Sequence[RequestView], most: int) -> TreeSnapshot | None:
        """At most `most` nodes of the tree, and which of `prompts` lie on them; None without one.

        Its cost grows with `most` and `prompts`, not with the tree.
        """
        return None

    def declined(self, rid: str) -> list[Declined]:
        """What was proposed in other words for this request and refused, as far as remembered."""
        return []

    def refusal(
        self, view: RequestView, exact: int, start: int, length: int, donor_start: int
    ) -> Refusal | None:
        """Why a run of equal tokens does not serve `view`, whose first `exact` tokens are served.

        The run has `length` tokens, at `start` of the prompt and `donor_start` of a cached path.
        None if nothing speaks against it.
        """
        if start != 0 or donor_start != 0:
            return Refusal("position", "this cache reuses text only where it begins both prompts")
        if length < self.page_size:
            return Refusal(
                "page",
                f"a shared beginning is reused in whole pages of {self.page_size} tokens; "
                f"this one has {length}",
            )
        return None

    def check(self, leases: Iterable[Lease]) -> None:
        """Prove that pages, owners and the backend's structure add up, given all live leases."""
        self.check_structure()
        self.pool.check([*(lease.pages for lease in leases), *self.resident()])

    # For backends.

    def _servable(self, view: RequestView) -> int:
        """Most tokens that a match may cover: whole pages, not the last token, `max_exact`."""
        limit = len(view.tokens) - 1
        if view.max_exact is not None:
            limit = min(limit, view.max_exact)
        return max(0, limit) // self.page_size * self.page_size

    def _shareable(self, lease: Lease, computed: int) -> int:
        """How many of `computed` tokens others may see: whole pages, nothing approximate."""
        plan = lease.plan
        if plan.approximate:
            computed = min(computed, plan.publishable)
        return computed // self.page_size * self.page_size

    def _converge(self, lease: Lease, first: int, canonical: IntArray) -> None:
        """Swap the lease's pages from index `first` on for the cache's, which hold the same."""
        if not len(canonical):
            return
        duplicates = lease.pages[first : first + len(canonical)].copy()
        self._journal.fields(self.counters, "converged_pages")
        self.pool.share(canonical)
        lease.replace(first, canonical)
        self.pool.drop(duplicates)
        self.counters.converged_pages += len(canonical)
