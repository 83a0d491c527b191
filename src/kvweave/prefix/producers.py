"""Who is computing which prefix right now, so that nobody else computes it too."""

from __future__ import annotations

from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Lease, Namespace, RequestView
from kvweave.prefix.node import common_prefix


class Producers:
    """Leases with prompt pages still to publish, by namespace and first page."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._groups: dict[tuple[Namespace, bytes], dict[Lease, IntArray]] = {}
        self._group_of: dict[Lease, tuple[Namespace, bytes]] = {}

    def add(self, lease: Lease, tokens: IntArray) -> None:
        """`lease` will compute and publish whole pages of `tokens`, as far as its plan is exact."""
        if len(tokens) - lease.published >= self._page_size:
            group = self._group(lease.namespace, tokens)
            self._group_of[lease] = group
            self._groups.setdefault(group, {})[lease] = tokens

    def progress(self, lease: Lease) -> None:
        """`lease` has published; it leaves once nothing of its prompt is to come."""
        group = self._group_of.get(lease)
        if group is not None and lease.published >= self._target(lease, self._groups[group][lease]):
            self.discard(lease)

    def discard(self, lease: Lease) -> None:
        """`lease` will publish nothing of its prompt any more."""
        group = self._group_of.pop(lease, None)
        if group is not None:
            del self._groups[group][lease]
            if not self._groups[group]:
                del self._groups[group]

    def promised(self, view: RequestView, matched: int, limit: int) -> int:
        """Tokens of `view.tokens[:limit]` that will be published; 0 if no more than `matched`."""
        if limit <= matched:
            return 0
        best, size = matched, self._page_size
        group = self._groups.get(self._group(view.namespace, view.tokens), {})
        for lease, tokens in group.items():
            end = min(limit, self._target(lease, tokens))
            if end <= best or common_prefix(view.tokens[best : best + size], tokens[best:]) < size:
                continue  # cannot beat what is promised already: seen at a glance
            best = max(best, common_prefix(view.tokens[:end], tokens) // size * size)
        return best if best > matched else 0

    def _target(self, lease: Lease, tokens: IntArray) -> int:
        return min(len(tokens), lease.plan.publishable) // self._page_size * self._page_size

    def _group(self, namespace: Namespace, tokens: IntArray) -> tuple[Namespace, bytes]:
        return namespace, tokens[: self._page_size].tobytes()
