"""Packed batches over a shuffled pool, and attention worked out the slow and certain way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvweave.engine.attention.base import AttentionBatch, LayerCall, SharedSegments
from kvweave.kv.layout import LayerLayout
from kvweave.kv.relocation import relocate
from kvweave.kv.tensors import KVTensors


def make_batch(
    positions: Sequence[Sequence[int]], page_size: int, generator: torch.Generator
) -> AttentionBatch:
    """One row per list of ascending positions; pages in random order."""
    counts = [row[-1] // page_size + 1 if row else 0 for row in positions]
    pages = torch.randperm(sum(counts), generator=generator).int()
    flat = [position for row in positions for position in row]
    return AttentionBatch(
        positions=torch.tensor(flat, dtype=torch.int64),
        slots=torch.zeros(len(flat), dtype=torch.int64),
        query_start=_starts([len(row) for row in positions]),
        pages=pages,
        page_start=_starts(counts),
        page_size=page_size,
        rows=len(positions),
        tokens=len(flat),
        longest=max((row[-1] for row in positions if row), default=-1) + 1,
    )


def make_kv(
    batch: AttentionBatch,
    layout: LayerLayout,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> KVTensors:
    """A pool of one layer, random where rows of the batch see it, not-a-number elsewhere."""
    kv = KVTensors([layout], max(1, len(batch.pages)), batch.page_size, dtype=dtype)
    seen = torch.zeros(kv.num_slots, dtype=torch.bool)
    for row in range(batch.rows):
        seen[_seen_slots(batch, row, layout.window)] = True
    slots = torch.arange(kv.num_slots)
    kv.write(
        0,
        slots,
        *(torch.randn(pool[0].shape, generator=generator) for pool in (kv.keys, kv.values)),
    )
    for pool in (kv.key_scales, kv.value_scales) if dtype == torch.int8 else (kv.keys, kv.values):
        pool[0][~seen] = torch.nan
    return kv


def expected(
    batch: AttentionBatch, query: torch.Tensor, kv: KVTensors, call: LayerCall
) -> torch.Tensor:
    """Attention in float64, one row and one head at a time."""
    every = torch.arange(kv.num_slots)
    keys, values = (
        read(call.layer, every, torch.float64) for read in (kv.read_keys, kv.read_values)
    )
    group = query.shape[1] // keys.shape[1]
    out = torch.zeros(query.shape[0], query.shape[1], values.shape[2], dtype=torch.float64)
    for row in range(batch.rows):
        first, last = int(batch.query_start[row]), int(batch.query_start[row + 1])
        slots = _slots(batch, row)
        for token in range(first, last):
            position = int(batch.positions[token])
            low = 0 if call.window is None else max(0, position - call.window + 1)
            for head in range(query.shape[1]):
                seen = slots[low : position + 1]
                scores = keys[seen, head // group] @ query[token, head].double() * call.scale
                if call.softcap is not None:
                    scores = call.softcap * torch.tanh(scores / call.softcap)
                if call.sinks is not None:
                    scores = torch.cat([scores, call.sinks[head : head + 1].double()])
                weights = scores.softmax(0)[: len(seen)]
                out[token, head] = weights @ values[seen, head // group]
    return out


def _starts(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def _slots(batch: AttentionBatch, row: int) -> torch.Tensor:
    pages = batch.pages[int(batch.page_start[row]) : int(batch.page_start[row + 1])].long()
    return (pages[:, None] * batch.page_size + torch.arange(batch.page_size)).flatten()


def _seen_slots(batch: AttentionBatch, row: int, window: int | None) -> torch.Tensor:
    first, last = int(batch.query_start[row]), int(batch.query_start[row + 1])
    if first == last:
        return torch.zeros(0, dtype=torch.int64)
    low = 0 if window is None else max(0, int(batch.positions[first]) - window + 1)
    return _slots(batch, row)[low : int(batch.positions[last - 1]) + 1]


def shared(
    batch: AttentionBatch, kv: KVTensors, rng: random.Random
) -> tuple[AttentionBatch, KVTensors]:
    """The same contexts, but with runs of them at a donor's positions, elsewhere in the pool.

    Returns a batch whose block tables hold the other positions, without a gap, and a pool that is
    larger. Needs rotations.
    """
    size, layout = kv.page_size, kv.layouts[0]
    assert layout.rotary is not None
    pool = KVTensors(kv.layouts, 3 * len(batch.pages) + 8, size, dtype=kv.dtype)
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(torch.nan)
    free = list(range(pool.num_slots // size))
    rng.shuffle(free)

    def put(slots: torch.Tensor, first: int, delta: int) -> list[int]:
        """Copy KV to new pages, behind `first` unused slots; with keys turned back by `delta`."""
        count = -(-(first + len(slots)) // size)
        pages = [free.pop() for _ in range(count)]
        places = first + torch.arange(len(slots))
        there = torch.tensor(pages, dtype=torch.int64)[places // size] * size + places % size
        pool.keys[0][there] = relocate(kv.keys[0][slots], layout.rotary, -delta)
        pool.values[0][there] = kv.values[0][slots]
        return pages

    runs: list[list[int]] = []
    pages: list[int] = []
    deltas: list[int] = []
    tables: list[list[int]] = []
    counts = []
    for row in range(batch.rows):
        queries = batch.positions[slice(*batch.query_start[row : row + 2].tolist())].tolist()
        length, at = max(queries, default=-1) + 1, rng.randint(0, 2 * size)
        slots, own = _slots(batch, row)[:length], torch.ones(length, dtype=torch.bool)
        counts.append(0)
        while at < length:
            end = min(length, at + rng.randint(1, 8 * size))
            needed, slot = end - at, rng.randint(0, size - 1)
            if not set(queries) & set(range(at, end)) and len(free) > len(batch.pages) + needed:
                delta = rng.randint(-5000, 5000)
                runs.append([at, end, len(pages), slot])
                pages += put(slots[at:end], slot, delta)
                deltas.append(delta)
                counts[-1] += 1
                own[at:end] = False
            at = end + rng.randint(0, 2 * size)
        tables.append(put(slots[own], 0, 0))
    segments = SharedSegments(
        _starts(counts),
        torch.tensor(runs, dtype=torch.int64).reshape(-1, 4),
        torch.tensor(pages, dtype=torch.int32),
        tuple(deltas),
    )
    compact = replace(
        batch,
        pages=torch.tensor([page for table in tables for page in table], dtype=torch.int32),
        page_start=_starts([len(table) for table in tables]),
        shared=segments if runs else None,
    )
    return compact, pool
