"""Cache events: blocks stored, blocks removed, all cleared.

The fields follow vLLM's and SGLang's KV events, which lets routers built for
them read ours. Only exact pages are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from kvweave.kv.journal import Journal
from kvweave.kv.pool import IntArray
from kvweave.prefix.hash_index import namespace_seed, page_hashes
from kvweave.prefix.lease import Namespace
from kvweave.prefix.tree import Node


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Pages kept: a 64-bit chained hash each, the parent's (None at a root), all their tokens."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventSink(Protocol):
    """Receives an engine's events. Called between steps, so it must neither wait nor raise."""

    @property
    def dropped(self) -> int:
        """Batches dropped since start, for lack of room."""
        ...

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Take the events of one step, in order."""
        ...

    def close(self) -> None:
        """Send what is queued, then stop; twice is harmless."""
        ...


class EventLog:
    """Events in the order in which things happened; none of an operation that was undone."""

    def __init__(self, page_size: int, journal: Journal) -> None:
        self._page_size = page_size
        self._journal = journal
        self._events: list[KVEvent] = []

    def stored(
        self, hashes: Iterable[int], parent: int | None, tokens: IntArray, namespace: Namespace
    ) -> None:
        """Pages with these `hashes` now hold `tokens`, behind the page with hash `parent`."""
        self._add(
            BlockStored(
                tuple(hashes), parent, tuple(tokens.tolist()), self._page_size, namespace.salt
            )
        )

    def removed(self, hashes: Iterable[int]) -> None:
        self._add(BlockRemoved(tuple(hashes)))

    def cleared(self) -> None:
        self._add(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """All events since the last call."""
        taken, self._events = self._events, []
        return taken

    def _add(self, event: KVEvent) -> None:
        self._journal.tail(self._events)
        self._events.append(event)


class TreeEvents(EventLog):
    """Observes a radix tree (`TreeObserver`). Hashes belong to pages: a split changes nothing."""

    def __init__(self, page_size: int, num_pages: int, journal: Journal) -> None:
        super().__init__(page_size, journal)
        self._hashes = np.zeros(num_pages, np.uint64)

    def on_store(self, node: Node, first_page: int) -> None:
        parent, seed = None, namespace_seed(node.namespace)
        before = node if first_page else node.parent
        if before is not None and before.parent is not None:  # a root has no pages
            last = first_page - 1 if first_page else -1
            parent = seed = int(self._hashes[before.pages[last]])
        tokens = node.tokens[first_page * self._page_size :]
        hashes = list(page_hashes(tokens, self._page_size, seed))
        self._hashes[node.pages[first_page:]] = hashes
        self.stored(hashes, parent, tokens, node.namespace)

    def on_split(self, upper: Node, lower: Node) -> None:
        pass

    def on_remove(self, node: Node, first_page: int) -> None:
        self.removed(self._hashes[node.pages[first_page:]].tolist())

    def on_reset(self) -> None:
        self.cleared()
