"""Pages and their owners."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvweave.errors import IntegrityError
from kvweave.kv.pool import IntArray, PagePool

PAGES = 8


def ids(*pages: int) -> IntArray:
    return np.array(pages, np.int32)


class Owners(RuleBasedStateMachine):
    """Owners come and go; the pool must agree with a list of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, 4)
        self.owners: list[IntArray] = []

    @rule(count=st.integers(0, PAGES + 2))
    def alloc(self, count: int) -> None:
        free = self.free()
        pages = self.pool.alloc(count)
        assert (pages is None) == (count > len(free))
        if pages is not None:
            assert len(set(pages.tolist())) == count
            assert set(pages.tolist()) <= free
            self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(range(len(self.owners))))
        pages = self.owners[owner][: data.draw(st.integers(0, len(self.owners[owner])))]
        self.pool.share(pages)
        self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        pages = self.owners.pop(data.draw(st.sampled_from(range(len(self.owners)))))
        before = self.pool.num_free
        assert self.pool.drop(pages) == self.pool.num_free - before

    @invariant()
    def adds_up(self) -> None:
        self.pool.check(self.owners)
        assert self.pool.num_free == len(self.free())
        held = [page for pages in self.owners for page in pages.tolist()]
        assert [self.pool.owners(page) for page in range(PAGES)] == [
            held.count(page) for page in range(PAGES)
        ]

    def free(self) -> set[int]:
        return set(range(PAGES)) - {page for pages in self.owners for page in pages.tolist()}


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_fresh_pool_hands_out_ascending_runs() -> None:
    pool = PagePool(6, 1)
    assert [pool.alloc(2).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_the_head_of_what_is_given_back_is_handed_out_first() -> None:
    pool = PagePool(4, 1)
    pages = pool.alloc(4)
    pool.drop(pages[::-1].copy())
    assert pool.alloc(4).tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize(("pages", "size"), [(0, 1), (1, 0), (-1, 4)])
def test_a_pool_without_slots_is_refused(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(pages, size)


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    pool = PagePool(4, 1)
    held = pool.alloc(2)
    for wrong in (
        lambda: pool.share(ids(1, 2)),
        lambda: pool.drop(ids(0, 3)),
        lambda: pool.alloc(-1),
    ):
        with pytest.raises((IntegrityError, ValueError)):
            wrong()
        pool.check([held])


def test_check_finds_wrong_owners_and_a_wrong_free_list() -> None:
    pool = PagePool(4, 1)
    held = pool.alloc(2)
    for owned in ([], [held, held], [ids(0)], [ids(0, 1, 2)]):
        with pytest.raises(IntegrityError):
            pool.check(owned)
    pool.check([held])
    pool._free[0] = pool._free[1]
    with pytest.raises(IntegrityError):
        pool.check([held])
    pool._free[0] = 0
    with pytest.raises(IntegrityError):
        pool.check([held])
