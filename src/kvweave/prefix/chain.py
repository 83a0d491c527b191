"""Names for pages: one 64-bit hash per page, chained over all that precedes it.

A page's hash is that of its tokens, seeded by its parent's hash; a prompt's first page is seeded by
its namespace. Equal in every process and on every machine of the same byte order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import TypeAlias

import xxhash

from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import Namespace

Hasher: TypeAlias = Callable[[bytes, int], int]
"""From bytes and a 64-bit seed to a 64-bit hash."""

xxh3: Hasher = xxhash.xxh3_64_intdigest


def namespace_seed(namespace: Namespace, hasher: Hasher = xxh3) -> int:
    """The parent hash of first pages. Absent fields differ from empty ones; fields never blur."""
    seed = 0
    for part in astuple(namespace):
        data = b"" if part is None else b"=" + part.encode("utf-8", "surrogatepass")
        seed = hasher(data, seed)
    return seed


def page_hashes(
    tokens: IntArray, page_size: int, parent: int, hasher: Hasher = xxh3
) -> Iterator[int]:
    """The hash of each whole page of `tokens` in turn, computed as it is asked for."""
    data = tokens.tobytes()
    step = page_size * tokens.itemsize
    for at in range(0, len(data) - step + 1, step):
        parent = hasher(data[at : at + step], parent)
        yield parent
