"""Text that a prompt computed although earlier prompts hold it too: found on demand, exactly.

Blocks of an earlier prompt are looked for at every offset of the new one. Where both meet, they are
compared along the whole diagonal (every position of the one against the same shift of the other),
so a run that is found is found whole. A shared run of 2 x BLOCK - 1 tokens holds a whole block; of
blocks that the prompt repeats, the first place is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvweave.fuzzy.hashing import block_hashes, window_hashes
from kvweave.kv.pool import IntArray
from kvweave.server.explorer.history import Record

BLOCK = 8
SURE_TO_BE_FOUND = 2 * BLOCK - 1
_DIAGONALS = 48
"""How many are compared whole, those with the most blocks in common first."""


class SharedRun(NamedTuple):
    """`length` equal tokens: from `start` of the prompt on, and from `donor_start` of `donor`."""

    donor: Record
    start: int
    length: int
    donor_start: int

    @property
    def exact_there(self) -> bool:
        """The donor computed it in sight of nothing approximate."""
        return self.donor_start + self.length <= self.donor.lends_up_to


def computed_mask(record: Record) -> npt.NDArray[np.bool_]:
    """Which positions of the prompt were computed without having KV of any donor: (length)."""
    mask = np.ones(record.prompt_length, np.bool_)
    mask[: record.exact] = False
    for span in record.spans:
        mask[span.start : span.end] = False
    return mask


def shared_runs(record: Record, earlier: Sequence[Record], most: int) -> list[SharedRun]:
    """The `most` longest runs that `record` computed and one of `earlier` has, longest first.

    They do not overlap in the prompt, and have SURE_TO_BE_FOUND tokens or more. What could have
    been lent, being of the same salt and exact, counts as longer than what never could.
    """

    def worth(run: SharedRun) -> int:
        return run.length * (1 + (run.donor.salt == record.salt) + run.exact_there)

    computed = computed_mask(record)
    found = [
        run
        for donor, shift in _diagonals(record.prompt, earlier)
        if (run := _longest(record.prompt, computed, donor, shift)) is not None
    ]
    found.sort(key=worth, reverse=True)
    kept: list[SharedRun] = []
    for run in found:
        if len(kept) < most and not any(_overlap(run, other) for other in kept):
            kept.append(run)
    return kept


def _diagonals(prompt: IntArray, earlier: Sequence[Record]) -> list[tuple[Record, int]]:
    """Donors and shifts (position here minus position there) with the most blocks in common."""
    windows = window_hashes(prompt, BLOCK, seed=0)
    if not len(windows):
        return []
    order = np.argsort(windows, kind="stable")
    windows = windows[order]
    counted: list[tuple[int, Record, int]] = []
    for donor in earlier:
        blocks = block_hashes(donor.tokens, BLOCK, seed=0)
        at = np.minimum(np.searchsorted(windows, blocks), len(windows) - 1)
        hits = np.flatnonzero(windows[at] == blocks)
        shifts, counts = np.unique(order[at[hits]] - hits * BLOCK, return_counts=True)
        best = np.argsort(-counts, kind="stable")[:_DIAGONALS]
        counted += [(int(counts[i]), donor, int(shifts[i])) for i in best]
    counted.sort(key=lambda entry: -entry[0])
    return [(donor, shift) for _, donor, shift in counted[:_DIAGONALS]]


def _longest(
    prompt: IntArray, computed: npt.NDArray[np.bool_], donor: Record, shift: int
) -> SharedRun | None:
    """The longest run of equal, computed tokens at this shift."""
    begin, end = max(0, shift), min(len(prompt), len(donor.tokens) + shift)
    there = donor.tokens[begin - shift : end - shift]
    equal = (prompt[begin:end] == there) & computed[begin:end]
    edges = np.flatnonzero(np.diff(equal.astype(np.int8), prepend=0, append=0))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    if not len(starts) or lengths.max() < SURE_TO_BE_FOUND:
        return None
    best = int(lengths.argmax())
    start = begin + int(starts[best])
    return SharedRun(donor, start, int(lengths[best]), start - shift)


def _overlap(one: SharedRun, other: SharedRun) -> bool:
    return one.start < other.start + other.length and other.start < one.start + one.length
