"""A request and its answers in the scheduler: tokens, lease and progress."""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

from kvweave.engine.types import GenerateRequest
from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import BoolArray, Lease, Namespace, Plan, RequestView, Reuse


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class RequestGroup:
    """The `n` answers to one request, which share its prompt and its accounting."""

    __slots__ = (
        "admitted",
        "cache_write_tokens",
        "counted_exact",
        "namespace",
        "prompt_computed",
        "request",
        "reuse",
        "running",
        "sequences",
    )

    def __init__(self, request: GenerateRequest, namespace: Namespace) -> None:
        self.request = request
        self.namespace = namespace
        self.sequences: list[Sequence] = []
        self.running = 0
        """How many of `sequences` hold a lease."""
        self.prompt_computed = False
        """Some answer's prompt has been computed to its end."""
        self.admitted = False
        self.counted_exact = False
        """The request was counted as exact: no answer of it may be served anything approximate."""
        self.reuse = Reuse()
        """Of the first admission; siblings and returns are not counted again."""
        self.cache_write_tokens: int | None = None
        """Prompt tokens that were computed and published; None before the first token."""

    def count_writes(self, lease: Lease) -> None:
        """Count what the first answer published of its prompt, once that is computed."""
        if self.cache_write_tokens is None:
            published = min(lease.published, len(self.request.prompt_ids))
            self.cache_write_tokens = max(0, published - self.reuse.exact)

    def count_reuse(self, plan: Plan) -> None:
        """Count what the first admission reuses."""
        self.admitted = True
        self.counted_exact = not plan.approximate
        self.reuse = plan.reuse


class Sequence:
    """One answer in the making.

    `limit` is the length, prompt included, at which it ends. What there is to compute is
    `plan.compute`, then every position after the plan's; `done` counts how many of those have run.
    `arrival` is unique and ascending, and survives preemption: it orders equal priorities.
    """

    __slots__ = (
        "_tokens",
        "_view",
        "arrival",
        "best_match",
        "done",
        "due",
        "group",
        "index",
        "lease",
        "length",
        "limit",
        "offered",
        "prompt_length",
        "recomputed",
        "scored",
        "share_spans",
        "stalled",
        "status",
        "stays_exact",
        "surplus_needed",
    )

    def __init__(
        self, group: RequestGroup, index: int, arrival: int, prompt: IntArray, limit: int
    ) -> None:
        self.group = group
        self.index = index
        self.arrival = arrival
        self.limit = limit
        self.prompt_length = self.length = len(prompt)
        self._tokens = np.empty(len(prompt) + min(max(limit - len(prompt), 0), 64), np.int32)
        self._tokens[: len(prompt)] = prompt
        self._view: RequestView | None = None
        self.status = Status.WAITING
        self.lease: Lease | None = None
        self.done = 0
        self.offered = 0
        """Tokens, in whole pages, that came from the cache or were published to it."""
        self.recomputed: list[npt.NDArray[np.integer]] = []
        """Positions inside spans that are computed all the same, ascending."""
        self.stays_exact = False
        """It was admitted as exact: it stays exact after a preemption."""
        self.share_spans = True
        """False once its shared spans kept it from getting pages although it ran alone."""
        self.scored = 0
        """Prompt tokens whose log probabilities are known, when they are wanted."""
        self.due: int | None = None
        """For the waiting queue: the count of admissions from which it has waited too long."""
        self.stalled = self.best_match = self.surplus_needed = 0  # for admission

    @property
    def rank(self) -> tuple[int, int]:
        """Ascending: the first of all sequences runs first and is preempted last."""
        return (-self.priority, self.arrival)

    @property
    def priority(self) -> int:
        return self.group.request.priority

    @property
    def tokens(self) -> IntArray:
        """Prompt and output so far, int32; a view."""
        return self._tokens[: self.length]

    @property
    def generated(self) -> int:
        return self.length - self.prompt_length

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of prompt tokens are still to be found."""
        wanted = self.group.request.sampling.prompt_logprobs is not None
        return wanted and self.index == 0 and self.scored < self.prompt_length - 1

    def append(self, token: int) -> None:
        """Add a sampled token, whose KV is not there yet."""
        if self.length == len(self._tokens):
            grown = np.empty(2 * self.length, np.int32)
            grown[: self.length] = self._tokens
            self._tokens = grown
        self._tokens[self.length] = token
        self.length += 1
        self._view = None

    def view(self) -> RequestView:
        """The view of it that caches get; kept until a token is added or it has to be exact."""
        request = self.group.request
        exact = self.scores_prompt or self.stays_exact or self.group.counted_exact
        if self._view is None or (exact and self._view.fuzzy):
            protected = request.protected_from
            if protected is None and self.generated:
                # Caches would count from the end, and take the question for older text.
                protected = 0
            self._view = RequestView(
                rid=request.rid,
                tokens=self.tokens,
                namespace=self.group.namespace,
                priority=request.priority,
                # A prompt token's log probability comes out of computing the token before it.
                max_exact=self.scored if self.scores_prompt else None,
                fuzzy=request.fuzzy and not exact,
                protected_from=protected,
                recompute_share=request.fuzzy_refresh,
                semantic=request.fuzzy_semantic,
                session=request.session,
                retain_seconds=request.retain_seconds,
                share_spans=self.share_spans,
            )
        return self._view

    def start(self, lease: Lease) -> None:
        self.lease = lease
        self.recomputed = [lease.plan.recompute]
        self.done = 0
        self.offered = lease.published
        self.status = Status.RUNNING
        self.group.running += 1

    def stop(self, status: Status) -> None:
        """Forget the lease, which the caller releases."""
        if self.status is Status.RUNNING:
            self.group.running -= 1
        if self.lease is not None and self.group.admitted:
            self.stays_exact = not self.plan.approximate
        self.lease = None
        self.status = status
        self._view = None

    @property
    def plan(self) -> Plan:
        assert self.lease is not None, "only running sequences have a plan"
        return self.lease.plan

    @property
    def decoding(self) -> bool:
        """The plan has run to its end: what remains is one sampled token at a time."""
        return self.done >= len(self.plan.compute)

    @property
    def remaining(self) -> int:
        """Positions to compute before the next token can be sampled."""
        plan = self.plan
        return len(plan.compute) + self.length - plan.length - self.done

    @property
    def frontier(self) -> int:
        """All positions below have KV."""
        plan = self.plan
        beyond = self.done - len(plan.compute)
        return plan.length + beyond if beyond > 0 else plan.frontier(self.done)

    def chunk(self, budget: int, unit: int) -> int:
        """How many positions to compute next: as `budget` allows, or a whole unit if that is more.

        Moved tokens are selected for recomputation in units of `unit` positions of the plan, and a
        unit with candidates is never cut: otherwise the selection would depend on the chunk
        borders, and those on the other requests.
        """
        count, candidates = min(self.remaining, budget), self.plan.candidates
        if candidates is None or self.decoding:
            return count
        end = min((self.done // unit + 1) * unit, len(candidates))
        if np.any(candidates[self.done : end]):
            return end - self.done
        return min(count, end - self.done)

    def candidates(self, count: int) -> tuple[BoolArray | None, int]:
        """Which of the next `count` positions the forward pass may select, and how many it selects.

        None if there is nothing to select. Over all chunks the selections add up to the plan's
        deferred budget.
        """
        plan = self.plan
        if plan.candidates is None or plan.deferred is None:
            return None, 0
        mine = plan.candidates[self.done : self.done + count]
        before = int(np.count_nonzero(plan.candidates[: self.done]))
        after = before + int(np.count_nonzero(mine))
        if before == after:
            return None, 0
        total, budget = int(np.count_nonzero(plan.candidates)), plan.deferred.budget
        return mine, after * budget // total - before * budget // total

    def computed(self, count: int) -> int:
        """How many of the next `count` positions go through all layers and do not drop out."""
        mine, chosen = self.candidates(count)
        return count if mine is None else count - int(np.count_nonzero(mine)) + chosen

    def last_position(self, count: int) -> int:
        """The highest of the next `count` positions."""
        plan = self.plan
        last = self.done + count - 1
        if last < len(plan.compute):
            return int(plan.compute[last])
        return plan.length + last - len(plan.compute)

    def next_positions(self, count: int) -> npt.NDArray[np.int32]:
        """The next `count` positions to compute, ascending."""
        plan = self.plan
        if self.done < len(plan.compute):
            return plan.compute[self.done : self.done + count]
        first = plan.length + self.done - len(plan.compute)
        return np.arange(first, first + count, dtype=np.int32)
