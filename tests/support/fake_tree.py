"""SGLang's radix tree in small: the classes that the plug-in builds on, under SGLang's names."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


@dataclass
class MatchPrefixParams:
    key: RadixKey
    req: Any = None


class MatchResult(NamedTuple):
    device_prefix_len: int
    last_device_node: Any
    last_host_node: Any
    best_match_node: Any
    host_hit_length: int = 0


@dataclass
class EvictParams:
    num_tokens: int = 0


@dataclass
class InitLoadBackParams:
    best_match_node: Any
    host_hit_length: int
    req: Any = None


class RadixKey:
    def __init__(
        self,
        token_ids: array[int],
        extra_key: str | None = None,
        limit: int | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.token_ids, self.extra_key, self.limit = token_ids, extra_key, limit
        self.cache_salt = cache_salt or None

    def pages(self, size: int) -> list[Any]:
        ids = self.token_ids[: self.limit]
        space = (self.extra_key, self.cache_salt)
        return [(space, tuple(ids[at : at + size])) for at in range(0, len(ids) - size + 1, size)]


class ReqToTokenPool:
    """The rows of slots; here, each request keeps its own."""

    def __init__(self) -> None:
        self.holders: dict[int, Any] = {}

    def write(self, indices: Any, values: torch.Tensor) -> None:
        number, where = indices
        req = self.holders[number]
        assert where.start == len(req.row), "the row has a gap, or is written over"
        assert where.stop - where.start == len(values)
        req.row = torch.cat([req.row, values])


@dataclass(eq=False)
class Node:
    """One page."""

    parent: Node | None
    edge: Any = None
    slots: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    children: dict[Any, Node] = field(default_factory=dict)
    locks: int = 0
    used: int = 0


class Allocator:
    """Whole pages of slots; page 0 is a dummy. Freeing twice is an error, as in SGLang's checks."""

    def __init__(self, size: int, page_size: int, pool: Any) -> None:
        self.size, self.page_size, self._pool = size, page_size, pool
        self.pages = list(range(1, size // page_size + 1))

    def get_kvcache(self) -> Any:
        return self._pool

    def available_size(self) -> int:
        return len(self.pages) * self.page_size

    def alloc(self, need: int) -> torch.Tensor | None:
        assert need % self.page_size == 0
        if need > self.available_size():
            return None
        count = need // self.page_size
        taken, self.pages = self.pages[:count], self.pages[count:]
        first = torch.tensor(taken, dtype=torch.int64)[:, None] * self.page_size
        return (first + torch.arange(self.page_size)).flatten()

    def free(self, slots: torch.Tensor) -> None:
        pages = torch.unique(slots // self.page_size).tolist()
        assert not set(pages) & set(self.pages), "freed twice"
        self.pages += pages


class UnifiedRadixCache:
    """A tree with a node per page."""

    def __init__(self, params: Any) -> None:
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.req_to_token_pool = ReqToTokenPool()
        self._clock = 0
        self.reset()

    def reset(self) -> None:
        self.root = Node(None)

    def supports_fast_match_prefix(self) -> bool:
        return True

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        node, depth = self.root, 0
        self._clock += 1
        for edge in params.key.pages(self.page_size):
            if edge not in node.children:
                break
            node, depth = node.children[edge], depth + 1
            node.used = self._clock
        return MatchResult(depth * self.page_size, node, node, node)

    def path_device_indices(self, node: Node) -> torch.Tensor:
        runs = [at.slots for at in _upwards(node)]
        return torch.cat([*reversed(runs), torch.zeros(0, dtype=torch.int64)])

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        return self.path_device_indices(req.last_node)[: req.prefix_len]

    def init_load_back(self, params: InitLoadBackParams) -> Any:
        raise AssertionError("the fake has no host memory")

    def load_back_is_cache_owned(self) -> bool:
        return True

    def lock(self, node_id: Node) -> Node:
        for at in _upwards(node_id):
            at.locks += 1
        return node_id

    def unlock(self, lock: Node | None) -> None:
        for at in _upwards(lock):
            at.locks -= 1
            assert at.locks >= 0

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert, adopt what is there already, and lock the longer path instead of the old."""
        node, size = self.root, self.page_size
        key = RadixKey(req.full_untruncated_fill_ids[:up_to], req.extra_key, None, req.cache_salt)
        for number, edge in enumerate(key.pages(size)):
            mine = slice(number * size, (number + 1) * size)
            if edge not in node.children:
                node.children[edge] = Node(node, edge, req.row[mine].clone())
            elif mine.start >= req.kv.cache_protected_len:
                self.token_to_kv_pool_allocator.free(req.row[mine])
            node = node.children[edge]
            req.row[mine] = node.slots
        lock = self.lock(node)
        self.unlock(req.lock)
        req.lock, req.last_node = lock, node
        req.kv.cache_protected_len = up_to // size * size

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        pass

    def evict(self, params: EvictParams) -> None:
        for _ in range(-(-params.num_tokens // self.page_size)):
            leaves = [at for at in self.nodes() if not at.children and not at.locks and at.parent]
            if not leaves:
                return
            leaf = min(leaves, key=lambda at: at.used)
            self.token_to_kv_pool_allocator.free(leaf.slots)
            del leaf.parent.children[leaf.edge]

    def evictable_size(self) -> int:
        return sum(len(at.slots) for at in self.nodes() if not at.locks)

    def nodes(self) -> list[Node]:
        found, stack = [], [self.root]
        while stack:
            found.append(stack.pop())
            stack += found[-1].children.values()
        return found


def _upwards(node: Node | None) -> Iterator[Node]:
    while node is not None and node.parent is not None:
        yield node
        node = node.parent
