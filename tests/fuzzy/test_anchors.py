"""Tests of the anchor table against a dictionary that does the same, slowly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvweave.errors import IntegrityError
from kvweave.fuzzy.anchors import AnchorTable

PAGES, SIZE, STRIDE = 24, 8, 4
HASHES = [0, 1, 2**63, 2**64 - 1, *(i << 60 | 5 for i in range(4)), 5, 6, 7]
"""Some equal in their highest bits, which choose the bucket, some not."""


class Anchors(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = AnchorTable(PAGES * SIZE, SIZE, STRIDE)
        self.model: dict[int, list[int]] = {}  # hash to slots, newest first
        self.used: set[int] = set()

    @rule(page=st.integers(0, PAGES - 1), hashes=st.lists(st.sampled_from(HASHES), max_size=4))
    def open(self, page: int, hashes: list[int]) -> None:
        slots = [slot for slot in range(page * SIZE, page * SIZE + SIZE) if slot not in self.used]
        pairs = list(zip(hashes, slots, strict=False))
        self.table.open(
            np.array([hash_ for hash_, _ in pairs], np.uint64),
            np.array([slot for _, slot in pairs], np.int32),
        )
        for hash_, slot in pairs:
            self.model.setdefault(hash_, []).insert(0, slot)
            self.used.add(slot)

    @rule(pages=st.lists(st.integers(0, PAGES - 1), unique=True, max_size=6))
    def close(self, pages: list[int]) -> None:
        self.table.close(np.array(pages, np.int32))
        gone = {slot for page in pages for slot in range(page * SIZE, page * SIZE + SIZE)}
        self.used -= gone
        for slots in self.model.values():
            slots[:] = [slot for slot in slots if slot not in gone]

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.model.clear()
        self.used.clear()

    @invariant()
    def finds_what_the_model_holds(self) -> None:
        at, anchors = self.table.probe(np.array(HASHES, np.uint64))
        found = {
            HASHES[i]: self.table.slots(anchor, 99) for i, anchor in zip(at, anchors, strict=True)
        }
        assert found == {hash_: slots for hash_, slots in self.model.items() if slots}
        assert len(self.table) == len(self.used)
        self.table.check()


TestAnchors = Anchors.TestCase
TestAnchors.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_room_grows_beyond_what_was_expected() -> None:
    table = AnchorTable(num_slots=8192, page_size=1, stride=16)
    hashes = np.arange(8192, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    table.open(hashes, np.arange(8192, dtype=np.int32))
    at, anchors = table.probe(hashes)
    assert len(at) == 8192
    assert [table.slots(anchor, 9) for anchor in anchors.tolist()] == [
        [slot] for slot in range(8192)
    ]
    table.check()


def test_repeated_text_costs_other_text_no_steps() -> None:
    """Ten thousand equal hashes in one bucket stand in one place of its chain."""
    table = AnchorTable(num_slots=160_000, page_size=16, stride=16)
    same, neighbour = 7 << 50, (7 << 50) + 1
    table.open(np.array([neighbour], np.uint64), np.array([159_999], np.int32))
    table.open(np.full(9_999, same, np.uint64), np.arange(9_999, dtype=np.int32) * 16)
    steps, at = 0, table._heads[same >> (64 - table._bits)]
    while at >= 0:
        steps, at = steps + 1, table._next[at]
    assert steps == 2
    at, anchors = table.probe(np.array([same, neighbour], np.uint64))
    assert table.slots(int(anchors[0]), 3) == [9_998 * 16, 9_997 * 16, 9_996 * 16]
    assert table.slots(int(anchors[1]), 3) == [159_999]


def test_check_finds_an_anchor_that_cannot_be_reached() -> None:
    table = AnchorTable(num_slots=64, page_size=16, stride=4)
    table.open(np.array([1, 2], np.uint64), np.array([3, 19], np.int32))
    table._first_on_page[1] = -1
    with pytest.raises(IntegrityError, match="2 can be found by hash and 1 by page"):
        table.check()
