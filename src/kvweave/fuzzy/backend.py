"""The backend that reuses more than prefixes: a radix cache whose leases carry spans.

Approximate KV is never shared. A span's KV is a copy in pages that only its lease owns, or lies in
the donor's own pages, read with queries turned the other way. KV computed behind a span depends on
it: a lease publishes nothing from its first span on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.errors import IntegrityError, UnsupportedModelError
from kvweave.fuzzy.donors import DonorTree, shared_run, slots_of, worth_their_paths
from kvweave.fuzzy.guard import Guard, LentDonors
from kvweave.fuzzy.matcher import PendingDonors
from kvweave.fuzzy.planner import plan_spans, why_not_planned
from kvweave.fuzzy.provider import Candidate, Gate, create_provider, split_tiers
from kvweave.fuzzy.recompute import choose
from kvweave.fuzzy.sessions import SessionCandidate, SessionDonors
from kvweave.kv.pool import IntArray, PagePool
from kvweave.kv.relocation import KVMover, MoveRun
from kvweave.plugins import BACKENDS, PARAPHRASE_GATE, load
from kvweave.prefix.contract import CacheOptions, CacheStats, Declined, NotReused, ReuseCounts
from kvweave.prefix.eviction import Key
from kvweave.prefix.lease import Lease, Namespace, Plan, RequestView, SharedSpan, Span, Tier
from kvweave.prefix.radix import RadixCache, RadixLease
from kvweave.prefix.tree import Node, Place, upwards

_log = logging.getLogger(__name__)

_NEAR = 16
"""Tokens before a span: if they are the donor's own, its first tokens are not computed again."""


class FuzzyCache(RadixCache):
    """Serves the exact prefix as radix does, then spans that a provider finds in the tree.

    Raises UnsupportedModelError when the model's KV cannot be moved.
    """

    name = "fuzzy_match"

    def __init__(self, pool: PagePool, options: CacheOptions, mover: KVMover) -> None:
        if mover.fixed_because is not None:
            exact = ", ".join(name for name, backend in BACKENDS.items() if not backend.moves)
            raise UnsupportedModelError(
                f"{mover.fixed_because}; it can be served with --prefix-cache-backend {exact}"
            )
        super().__init__(pool, options)
        self._config = options.fuzzy or FuzzyConfig()
        self._mover = mover
        self._unmoved = 0
        self._donors = DonorTree(self.tree, pool.num_pages)
        self._donors.decode = options.decode
        self._donors.listener = self._guard = self._provider()
        self._pending_donors = PendingDonors(pool.page_size, self._config)
        self._sessions = SessionDonors(
            pool,
            self._config.stride,
            self._config.min_span,
            self._config.session_seconds,
            self._config.session_generations,
        )
        create_gate = load(PARAPHRASE_GATE)
        self.paraphrases: Gate = create_gate(self._donors, self._config, options.decode)

    def lease(self, view: RequestView) -> RadixLease:
        lease: RadixLease | None = None
        try:
            lease = super().lease(view)
            self._donors.leases.add(lease)
            pieces = self._pieces(view, lease.plan.exact) if self._allows(view) else []
            if pieces:
                self._realize(lease, pieces, view)
            if view.fuzzy and self.options.wait_for_pending:
                # What it computes although it might have been served stands nowhere else.
                self._pending_donors.add(lease, view.tokens)
            return lease
        except BaseException:
            if lease is not None:
                self.release(lease)  # nobody else knows of it yet
            raise

    def release(self, lease: Lease) -> None:
        self._donors.leases.discard(lease)
        self._pending_donors.discard(lease)
        self._sessions.let_go(lease)
        super().release(lease)

    def publish(self, lease: Lease, tokens: IntArray, computed: int) -> None:
        if len(self._sessions) and not lease.plan.approximate:
            whole = computed // self.page_size * self.page_size
            self._sessions.healed(lease.namespace, lease.rid, whole)
        donors = self._donors
        donors.publisher, donors.semantic = lease.rid, lease.semantic
        donors.prompt_end = self._shareable(lease, lease.plan.length)
        super().publish(lease, tokens, computed)

    def continuation(self, lease: Lease, tokens: IntArray, most: int) -> IntArray:
        found = super().continuation(lease, tokens, most)
        if len(found):
            return found
        # The shortest end of which the span index is sure to find an equal run.
        view = RequestView(lease.rid, tokens[1 - 2 * self._config.stride :], lease.namespace)
        for claim in self._guard.nominate(view):
            run = self._donors.verified(view, claim) if claim.tier is Tier.MOVED else None
            if run is not None and run.end == len(view.tokens):
                return self._following(run, most)
        return found

    def _following(self, run: Candidate, most: int) -> IntArray:
        """Up to `most` tokens behind a verified donor run."""
        node = self._donors.node(run.page)
        assert node is not None  # verified, and the tree has not changed since
        pages, within = divmod(run.donor_end - node.start, self.page_size)
        begun = node.tokens[pages * self.page_size :][:within]
        return self.tree.following(Place(node, pages), begun, most)

    def retain(self, lease: Lease, tokens: IntArray, computed: int) -> None:
        if self._config.session_donors:
            self._sessions.expire()
            used = self.tree.eviction_key(lease.priority)
            self._sessions.keep(lease, tokens, computed, used)

    def close_session(self, namespace: Namespace, session: str) -> int:
        return self._sessions.close((namespace, session))

    def evict(self, pages: int, before: Key | None = None) -> int:
        """As for radix. Of equally old KV, session donors go before what is exact."""
        freed = 0
        while freed < pages:
            segment = self._sessions.oldest()
            if segment is None or (before is not None and segment.used >= before):
                return freed + super().evict(pages - freed, before)
            freed += super().evict(pages - freed, segment.used)
            if freed < pages:
                freed += self._sessions.drop(segment)
        return freed

    def reset(self) -> None:
        if not self._donors.leases:  # else it is refused, and nothing changes
            self._sessions.clear()
        super().reset()

    def resident(self) -> Iterator[IntArray]:
        yield from super().resident()
        yield from self._sessions.resident()

    @property
    def evictable_pages(self) -> int:
        return super().evictable_pages + self._sessions.evictable_pages

    @property
    def cached_pages(self) -> int:
        return super().cached_pages + self._sessions.pages

    def _touch(self, lease: Lease) -> None:
        super()._touch(lease)
        for span in lease.plan.spans:
            if span.generation:
                self._sessions.touch(span.donor, self.tree.eviction_key(lease.priority))
                continue
            node = self._donors.named(span.donor)
            if node is not None:
                self.tree.touch(node, lease.priority, hits=1)

    def pending_prefix(self, view: RequestView, matched: int) -> int:
        """As for radix; or `matched` plus the tokens that a running request will soon donate."""
        exact = super().pending_prefix(view, matched)
        if exact or not self.options.wait_for_pending or not self._allows(view):
            return exact
        awaited = (
            0 if self._is_healed(view, matched) else self._pending_donors.awaited(view, matched)
        )
        return matched + awaited if awaited else 0

    def most_shared(self, view: RequestView, matched: int) -> int:
        if not (self._allows(view) and self._shares(view)):
            return 0
        cached = super().cached_pages * self.page_size
        most = min(len(view.tokens) - self._config.min_suffix, cached) - matched
        return most if most >= self._config.share_span else 0

    def stats(self) -> CacheStats:
        counters = super().stats()
        counters.provider = {
            "failed_moves": self._unmoved,
            **self.paraphrases.stats(),
            **self._guard.stats(),
        }
        return counters

    def reuse_counts(self) -> ReuseCounts:
        return ReuseCounts(
            declined=dict(self.paraphrases.declined),
            events={**self._guard.counts, "failed_moves": self._unmoved},
            provider=self._guard.told,
        )

    def declined(self, rid: str) -> list[Declined]:
        return [each for each in self.paraphrases.latest_declined if each.rid == rid]

    def why_not_reused(
        self, view: RequestView, exact: int, start: int, length: int, donor_start: int
    ) -> NotReused | None:
        if start == donor_start == 0:
            return super().why_not_reused(view, exact, start, length, donor_start)
        if not view.fuzzy:
            return NotReused("exact-only", "the request asked for an answer from exact KV only")
        if self._config.max_share == 0:
            return NotReused("max-share", "--fuzzy-max-share 0 demands exactness of every request")
        if self._is_healed(view, exact):
            return NotReused(
                "healed",
                "all full pages are cached exactly: the rest is computed, so that the "
                "answer is exact",
            )
        run = Candidate(start=start, length=length, page=-1, donor_start=donor_start)
        return why_not_planned(run, len(view.tokens), exact, self._config)

    def settle(self, seconds: float) -> bool:
        """Wait for what the provider does in the background; False if it takes longer."""
        return self._guard.settle(seconds)

    def check(self, leases: Iterable[Lease]) -> None:
        leases = list(leases)
        super().check(leases)
        for lease in leases:
            for run in lease.shared:
                self._check_shared(lease, run)

    def _check_shared(self, lease: Lease, run: SharedSpan) -> None:
        size, last = self.page_size, run.slot + run.end - run.start - 1
        nodes = {self._donors.node(page) for page in run.pages.tolist()}
        pinned = {above for node in getattr(lease, "pinned", ()) for above in upwards(node)}
        starts = [self._donors.start(page) for page in run.pages.tolist()]
        first = run.start - run.delta - run.slot
        if (
            len(run.pages) != last // size + 1
            or starts != list(range(first, first + len(starts) * size, size))
            or not nodes <= pinned
        ):
            raise IntegrityError(
                f"request {lease.rid} reads [{run.start}, {run.end}) in pages that are not, or "
                "may cease to be, its donor's"
            )

    def check_structure(self) -> None:
        super().check_structure()
        self._donors.check(self.tree)
        self._sessions.check()

    def _provider(self) -> Guard:
        name, donors = self._config.provider, LentDonors(self._donors)
        provider = create_provider(name, donors, self._config)
        return Guard(name, provider, donors, self._config.time_budget_ms)

    def _allows(self, view: RequestView) -> bool:
        # A bound on the exact prefix means that the tokens behind it must be computed.
        wanted = self._config.max_share > 0 and self._share(view) != 1
        return view.fuzzy and view.max_exact is None and wanted

    def _share(self, view: RequestView) -> float | None:
        """The share of moved tokens to recompute; at 1, nothing is moved. None: by the spans."""
        return self._config.refresh if view.recompute_share is None else view.recompute_share

    def _is_healed(self, view: RequestView, exact: int) -> bool:
        """Whether healing could add nothing to an exact prefix of `exact` tokens.

        Less than a page is left to compute then. To serve some of it from moved KV would make the
        answer approximate for ever, since the last page of a prompt is never full.
        """
        return self._config.heal and exact > 0 and exact == self._servable(view)

    def _pieces(self, view: RequestView, exact: int) -> list[Candidate]:
        """What to serve beyond the exact prefix: verified, chosen and cut to size."""
        config, length = self._config, len(view.tokens)
        if length - config.min_suffix - exact < config.min_span or self._is_healed(view, exact):
            return []
        runs: list[Candidate] = []
        claims, others = split_tiers(self._guard.match(view, exact))
        for claim in claims:
            run = self._donors.verified(view, claim)
            if run is None:
                self._guard.count_not_cached(claim)
            else:
                runs.append(run)
        if config.session_donors:
            runs += self._sessions.find(view, exact, config.time_budget_ms / 2000)
        pieces = plan_spans(runs, length, exact, config)
        if not others or not view.semantic:
            return pieces
        return self.paraphrases.fill(view, exact, pieces, others)

    def _realize(self, lease: RadixLease, pieces: list[Candidate], view: RequestView) -> None:
        """Copy the donors' KV into pages of the lease's own; if that fails, it stays exact."""
        nodes = [self._donors.node(piece.page) for piece in pieces]
        self._set_pinned(lease, [node for node in nodes if node is not None])
        self._sessions.hold(
            lease, [piece.segment for piece in pieces if isinstance(piece, SessionCandidate)]
        )
        exact_pages = len(lease.pages)
        plan, sources, shared = self._planned(lease, pieces, nodes, view)
        # Evicts others if need be; the donors are locked.
        has_room = self._lay_out(lease, pieces[-1].end, [run for run in shared if run])
        if has_room and not self._move(lease, plan, sources):
            self._shrink(lease, exact_pages)
        self._sessions.let_go(lease)
        read = zip(nodes, shared, strict=True) if lease.shared else ()
        self._set_pinned(
            lease, [node for node, run in read if node is not None and run is not None]
        )

    def _planned(
        self,
        lease: RadixLease,
        pieces: list[Candidate],
        nodes: Sequence[Node | None],
        view: RequestView,
    ) -> tuple[Plan, list[IntArray], list[SharedSpan | None]]:
        """The plan; and for each of its spans the donor's slots, and what is read in them."""
        spans, sources, continued = [], [], []
        for piece in pieces:
            span, slots, earlier = self._donor_of(piece)
            spans.append(span)
            sources.append(slots)
            if len(earlier) and np.array_equal(
                earlier, view.tokens[span.start - len(earlier) : span.start]
            ):
                continued.append(span)
        chosen, deferred = choose(
            spans,
            self._share(view),
            self._config.refresh_strategy,
            self._config.refresh_tokens,
            continued,
        )
        shared: list[SharedSpan | None] = [None] * len(spans)
        if deferred is None and self._shares(view):
            shared = [
                shared_run(span, slots, chosen, self.page_size, self._config.share_span)
                for span, slots in zip(spans, sources, strict=True)
            ]
            shared = worth_their_paths(shared, nodes)
        spans = [
            replace(span, shared=run.end - run.start) if run else span
            for span, run in zip(spans, shared, strict=True)
        ]
        plan = Plan(lease.plan.length, lease.plan.exact, tuple(spans), chosen, deferred)
        return plan, sources, shared

    def _shares(self, view: RequestView) -> bool:
        return bool(self._config.share_span) and view.share_spans and not self._guard.zeroed_layers

    def _move(self, lease: RadixLease, plan: Plan, sources: Sequence[IntArray]) -> bool:
        """Fill the lease's own pages and let it follow `plan`; False, and it does not, if not."""
        runs = []
        for span, slots in zip(plan.spans, sources, strict=True):
            own, first = span.length - span.shared, lease.own_slot(span.start)
            runs.append(
                MoveRun(
                    sources=slots[:own],
                    targets=slots_of(lease.pages, self.page_size, first, first + own),
                    delta=span.start - span.donor_start,
                    zeroed=self._guard.zeroed_layers,
                )
            )
        try:
            self._mover.move(runs)
        except IntegrityError:
            raise  # an error of kvweave's own
        except Exception:
            self._unmoved += 1
            if self._unmoved == 1:
                _log.exception("moving KV failed; requests go on with their exact prefix")
            return False
        lease.plan = plan
        return True

    def _donor_of(self, piece: Candidate) -> tuple[Span, IntArray, IntArray]:
        """The span that `piece` becomes, its donor's slots, and the text before it there."""
        first = max(0, piece.donor_start - min(_NEAR, piece.start))
        if isinstance(piece, SessionCandidate):
            segment = piece.segment
            donor, generation = segment.number, segment.generation
            slots, earlier = self._sessions.slots(piece), segment.text[first : piece.donor_start]
        else:
            node = self._donors.node(piece.page)
            assert node is not None  # locked
            donor, generation, slots = node.order, 0, self._donors.slots(piece)
            earlier = self._donors.tokens(piece.page, first)[: piece.donor_start - first]
        span = Span(piece.start, piece.length, donor, piece.donor_start, piece.tier, generation)
        return span, slots, earlier
