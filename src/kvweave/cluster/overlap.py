"""Overlap of a prompt with each replica's cache, from cache events, and the ranking of replicas.

The exact prefix is found by page hashes, as in the replica's own cache. Moved text is found by
anchors, as in the span index: the hash of one window of tokens per stride of cached text, which a
prompt looks for at every offset. Tokens are not compared: a hash collision costs time, and cannot
make an answer wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvweave.fuzzy.matcher import anchors_of, window_hashes
from kvweave.kv.pool import IntArray
from kvweave.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvweave.prefix.hash_index import namespace_seed, page_hashes
from kvweave.prefix.lease import Namespace


@dataclass(frozen=True, slots=True)
class Keying:
    """Parameters of the keys, equal in all replicas of one model."""

    model: str
    """The loaded model's identity."""
    page_size: int
    stride: int
    """Tokens between two anchors, and in the window of one."""


class PromptKeys:
    """Hashes of one prompt, computed once for all replicas."""

    def __init__(self, tokens: IntArray, salt: str | None, keying: Keying) -> None:
        """`tokens` is int32; the last one is never served from a cache."""
        self.length = len(tokens)
        self.page_size, self.stride = keying.page_size, keying.stride
        seed = namespace_seed(Namespace(keying.model, salt=salt))
        whole = (len(tokens) - 1) // keying.page_size * keying.page_size
        self.pages = list(page_hashes(tokens[:whole], keying.page_size, seed))
        self.windows = window_hashes(tokens[:-1], keying.stride, _anchor_seed(salt)).tolist()
        """Window hashes at every offset."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Tokens of a prompt that a replica would reuse."""

    exact: int
    moved: int


class ReplicaView:
    """The blocks of one replica's cache, and those that running requests will add."""

    def __init__(self, keying: Keying) -> None:
        self._keying = keying
        self._blocks: dict[int, _Block] = {}
        self._anchors: Counter[int] = Counter()
        """Blocks per anchor; a text may be cached in several places."""
        self._expected: Counter[int] = Counter()

    @property
    def blocks(self) -> frozenset[int]:
        """Hashes of all blocks known to be cached."""
        return frozenset(self._blocks)

    @property
    def kept(self) -> int:
        """Tokens that are cached or expected."""
        return (len(self._blocks) + len(self._expected)) * self._keying.page_size

    def apply(self, events: Iterable[KVEvent]) -> None:
        """Follow the replica's cache, in order."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self._remove(name)
            elif isinstance(event, AllBlocksCleared):
                self._blocks.clear()
                self._anchors.clear()

    def expect(self, keys: PromptKeys) -> None:
        """Count the prompt of a request that is sent there as cached."""
        self._expected.update(keys.pages)

    def unexpect(self, keys: PromptKeys) -> None:
        """End of the request; events have reported the blocks that remain."""
        self._expected.subtract(keys.pages)
        for name in keys.pages:
            if self._expected[name] <= 0:
                del self._expected[name]

    def overlap(self, keys: PromptKeys) -> Overlap:
        """Tokens of the prompt that this replica would reuse: exact prefix, then moved text."""
        exact = 0
        for name in keys.pages:
            if name not in self._blocks and name not in self._expected:
                break
            exact += keys.page_size
        return Overlap(exact, self._moved(keys, exact))

    def _moved(self, keys: PromptKeys, exact: int) -> int:
        anchors = self._anchors
        found = [at for at in range(exact, len(keys.windows)) if keys.windows[at] in anchors]
        covered, end = 0, exact
        for at in found:  # overlapping windows count once
            covered += at + keys.stride - max(at, end)
            end = at + keys.stride
        return covered

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        tokens = np.array(event.token_ids, np.int32)
        begin = self._depth(parent)
        anchors = self._anchors_of(event, tokens, begin)
        for at, name in enumerate(event.block_hashes):
            if name not in self._blocks:  # a replay after a loss repeats blocks
                own = tokens[at * size : (at + 1) * size]
                self._blocks[name] = _Block(parent, own, begin + (at + 1) * size, anchors[at])
                self._anchors.update(anchors[at])
            parent = name

    def _remove(self, name: int) -> None:
        block = self._blocks.pop(name, None)
        for anchor in block.anchors if block else ():
            self._anchors[anchor] -= 1
            if not self._anchors[anchor]:
                del self._anchors[anchor]

    def _depth(self, parent: int | None) -> int:
        block = None if parent is None else self._blocks.get(parent)
        return 0 if block is None else block.end

    def _anchors_of(self, event: BlockStored, tokens: IntArray, begin: int) -> list[list[int]]:
        """Per block: hashes of the windows at multiples of the stride that end in it."""
        stride, size = self._keying.stride, event.block_size
        before = self._up_to(event.parent_block_hash, stride - 1)
        text, start = np.concatenate([before, tokens]), begin - len(before)
        hashes, ends = anchors_of(text, start, begin, stride, _anchor_seed(event.salt))
        found: list[list[int]] = [[] for _ in event.block_hashes]
        for end, anchor in zip(ends.tolist(), hashes.tolist(), strict=True):
            found[(end - begin) // size].append(anchor)
        return found

    def _up_to(self, name: int | None, count: int) -> IntArray:
        """The last `count` tokens up to the end of this block; fewer if some are unknown."""
        runs, length = [np.empty(0, np.int32)], 0
        while length < count and name is not None and (block := self._blocks.get(name)):
            runs.append(block.tokens)
            length += len(block.tokens)
            name = block.parent
        return np.concatenate(runs[::-1])[max(0, length - count) :]


@dataclass(slots=True, eq=False)
class _Block:
    parent: int | None
    tokens: IntArray
    end: int
    """Position after its last token."""
    anchors: list[int]


def _anchor_seed(salt: str | None) -> int:
    """Replicas serve one model, so the salt alone separates namespaces."""
    return namespace_seed(Namespace("", salt=salt))


_Replica = TypeVar("_Replica")


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the ranking.

    `moved`: worth of a moved token; an exact one is worth 1.

    `load`: weight of a token of waiting work against a saved token. Below 1, since waiting work
    ends soon, and a second copy of computed text uses memory for long.

    `least_share`: overlap below this share of the prompt is ignored. Otherwise a common system
    prompt would send every new conversation to the same replica.
    """

    moved: float = 0.7
    load: float = 0.25
    least_share: float = 0.25


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's figures for one prompt, in tokens."""

    overlap: Overlap
    load: int
    """Unfinished work."""
    kept: int
    """Tokens in its cache."""


def score(replica: ReplicaLoad, length: int, weights: Weights) -> float:
    """Tokens that this replica saves, less its weighted load."""
    saved = replica.overlap.exact + weights.moved * replica.overlap.moved
    worth = saved if saved >= weights.least_share * length else 0.0
    return worth - weights.load * replica.load


def ranked(loads: Mapping[_Replica, ReplicaLoad], length: int, weights: Weights) -> list[_Replica]:
    """Best first. Equal ones by the least cached tokens, which spreads new conversations."""

    def order(replica: _Replica) -> tuple[float, int]:
        load = loads[replica]
        return -score(load, length, weights), load.kept

    return sorted(loads, key=order)
