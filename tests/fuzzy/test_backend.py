"""Tests of spans in leases: what is served, what it costs, and that nothing approximate spreads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvweave.errors import IntegrityError, UnsupportedModelError
from kvweave.fuzzy.backend import FuzzyCache
from kvweave.kv.pool import PagePool
from kvweave.prefix.contract import CacheOptions
from kvweave.prefix.events import BlockStored
from kvweave.prefix.lease import Namespace, Tier
from support.fuzzy_world import HERE, SMALL, Running, SlotMover, World, joined, text


def spans(running: Running) -> list[tuple[int, int, int]]:
    """(start, end, donor_start) of every span that serves it."""
    return [(span.start, span.end, span.donor_start) for span in running.lease.plan.spans]


def test_a_document_behind_another_header_is_moved(world: World) -> None:
    document = text(1, 160)
    world.serve(text(2, 7) + document + text(3, 9))
    running = world.start(text(4, 19) + document + text(5, 9))
    [span] = running.lease.plan.spans
    assert (span.start, span.donor_start, span.tier) == (19, 7, Tier.MOVED)
    assert 160 - world.pool.page_size < span.length <= 160
    assert running.lease.plan.publishable(running.lease.plan.length) == 19
    world.check()


def test_passages_in_another_order_cover_a_prompt_and_something_is_still_computed(
    world: World,
) -> None:
    a, b, c = text(1, 64), text(2, 64), text(3, 64)
    world.serve(a + b + c)
    running = world.start(c + a + b)
    assert running.lease.plan.served >= 192 - 2 - 2 - 2 - world.pool.page_size
    assert running.lease.plan.compute[-1] == 191
    assert world.compute(running)
    world.check()


def test_an_exact_prefix_comes_first_and_positions_stay_absolute(world: World) -> None:
    head, document = text(1, 48), text(2, 64)
    world.serve(head + text(3, 16))
    world.serve(text(4, 21) + document + text(5, 16))
    running = world.start(head + text(6, 5) + document + text(7, 9))
    assert running.lease.plan.exact == 48
    assert spans(running)[0][::2] == (53, 21)
    assert world.compute(running)
    world.check()


def test_every_piece_comes_from_the_donor_that_holds_it(world: World) -> None:
    documents = [text(seed, 64) for seed in range(9)]
    for seed, document in enumerate(documents):
        world.serve(text(100 + seed, 3 + seed) + document + text(200 + seed, 20))
    order = [4, 0, 8, 3, 3, 7]
    running = world.start(joined(*(documents[at] + [at] for at in order)) + text(300, 9))
    assert [span[2] for span in spans(running)] == [9, 3, 11, 6, 6, 10]
    assert len({span.donor for span in running.lease.plan.spans}) == 5
    assert [span[1] - span[0] for span in spans(running)][1:] == [64] * 5
    world.check()


def test_the_same_request_again_and_three_at_once(world: World) -> None:
    document = text(1, 96)
    world.serve(text(2, 7) + document + text(3, 20))
    prompt = text(4, 11) + document + text(5, 12)
    for _ in range(2):
        assert world.serve(prompt).lease.plan.served > 80
        world.check()
    batch = [world.start(prompt) for _ in range(3)]
    assert all(one.lease.plan.served > 80 for one in batch)
    for chunk in (3, 50):
        assert all(world.compute(one, chunk) for one in batch)
        world.check()


def test_donors_first_tokens_stay_at_the_front(world: World) -> None:
    document = text(1, 96)
    world.serve(document + text(2, 32))
    running = world.start(text(3, 20) + document + text(4, 9))
    assert spans(running) == [(20 + SMALL.sink_tokens, 116, SMALL.sink_tokens)]


# What is approximate never spreads.


def test_nothing_from_the_first_span_on_is_published_evented_or_lent(world: World) -> None:
    observed = World(2048 // world.pool.page_size, world.pool.page_size, events=True)
    document, tail = text(1, 64), text(2, 64)
    observed.serve(text(3, 7) + document + text(4, 16))
    observed.cache.take_events()
    head = text(5, 33)
    running = observed.start(head + document + tail)
    assert observed.compute(running)
    running.tokens += text(6, 32)
    assert observed.compute(running)
    exact = 33 // observed.pool.page_size * observed.pool.page_size
    stored = [event for event in observed.cache.take_events() if isinstance(event, BlockStored)]
    assert sum((event.token_ids for event in stored), ()) == tuple(head[:exact])
    assert running.lease.published == exact
    observed.finish(running)
    observed.check()
    again = observed.start(head + document + tail)
    assert again.lease.plan.exact == exact
    # Neither what was computed behind the span nor what was generated is anybody's donor.
    for lost in (tail, text(6, 32)):
        assert observed.start(text(7, 9) + lost + text(8, 9)).lease.plan.spans == ()
    observed.check()


def test_chunks_of_an_approximate_prompt_make_progress_to_its_end(world: World) -> None:
    document = text(1, 64)
    world.serve(text(2, 7) + document + text(3, 16))
    running = world.start(text(4, 9) + document + text(5, 40) + document + text(6, 40))
    assert len(running.lease.plan.spans) == 2
    while running.done < len(running.lease.plan.compute):
        assert world.compute(running, 7)
        world.check()
    assert running.frontier == running.lease.plan.length


def test_a_thousand_shifts_lend_from_the_one_exact_copy(world: World) -> None:
    """Moved copies are no donors (the mover asserts it), so nothing is ever rotated twice."""
    document = text(1, 64)
    world.serve(text(2, 7) + document + text(3, 20))
    for shift in range(100, 1100, 10):
        running = world.start(text(shift, shift % 37 + 3) + document + text(shift + 1, 5))
        assert [run.delta for run in world.mover.moved[-1]] == [shift % 37 + 3 - 7]
        assert world.compute(running)
        world.finish(running)
    world.check()


# Who may not be served approximately.


def test_exactness_can_be_demanded(world: World) -> None:
    document = text(1, 64)
    world.serve(text(2, 7) + document + text(3, 20))
    prompt = text(4, 11) + document + text(5, 9)
    assert world.start(prompt, fuzzy=False).lease.plan.spans == ()
    assert world.start(prompt, max_exact=0).lease.plan.spans == ()
    exact = World(512, 4, replace(SMALL, max_share=0.0))
    exact.serve(text(2, 7) + document + text(3, 20))
    assert exact.start(prompt).lease.plan.spans == ()
    assert exact.cache.stats().provider["asked"] == 0


def test_namespaces_lend_nothing_to_each_other(world: World) -> None:
    document = text(1, 64)
    prompt = text(4, 11) + document + text(5, 9)
    spaces = [HERE, Namespace("model", salt=""), Namespace("model", salt="a")]
    for space in spaces:
        running = world.start(text(2, 7) + document + text(3, 20), space)
        assert running.lease.plan.served == 0
        assert world.compute(running)
    for space in spaces:
        assert world.start(prompt, space).lease.plan.served > 40
    assert world.start(prompt, Namespace("model", adapter="a")).lease.plan.served == 0


def test_a_model_that_cannot_be_moved_is_refused_in_its_own_words() -> None:
    mover = SlotMover()
    mover.fixed_because = "its keys cannot be moved: they carry no positions"
    with pytest.raises(UnsupportedModelError, match="they carry no positions"):
        FuzzyCache(PagePool(8, 4), CacheOptions(fuzzy=SMALL), mover)


# Room, and failure.


def test_room_comes_from_eviction_and_never_from_the_donor() -> None:
    world = World(num_pages=40, page_size=4)
    document = text(1, 64)
    world.serve(document + text(2, 12))  # the least recently used: first to go
    world.serve(text(3, 76))
    assert world.pool.num_free == 2
    running = world.start(text(4, 5) + document[4:] + text(5, 3))
    assert spans(running) == [(5, 65, 4)]
    assert world.cache.counters.evicted_pages > 0
    world.check()


def test_without_room_the_request_starts_exact_and_nothing_leaks() -> None:
    world = World(num_pages=40, page_size=4)
    document = text(1, 64)
    world.serve(text(2, 4) + document + text(3, 4))
    holder = world.start(text(4, 4))
    assert world.cache.grow(holder.lease, 4 * 21)
    running = world.start(text(5, 5) + document + text(6, 4))
    assert running.lease.plan.spans == ()
    assert len(running.lease.pages) == 0
    world.check()
    assert world.cache.evictable_pages == 18


def test_a_failing_copy_costs_the_spans_only(caplog: pytest.LogCaptureFixture) -> None:
    world = World(num_pages=200, page_size=4)
    head, document = text(1, 16), text(2, 64)
    world.serve(head + text(3, 4))
    world.serve(text(4, 7) + document + text(5, 20))
    free = world.pool.num_free
    for _ in range(3):
        world.mover.fail_next = True
        running = world.start(head + text(6, 5) + document + text(7, 9))
        assert (running.lease.plan.exact, running.lease.plan.spans) == (16, ())
        world.check()
        world.finish(running)
        assert world.pool.num_free == free
    assert world.cache.stats().provider["failed_moves"] == 3
    assert len(caplog.records) == 1
    assert world.start(head + text(6, 5) + document + text(7, 9)).lease.plan.served > 50


@pytest.mark.parametrize("fault", [ArithmeticError, IntegrityError])
def test_a_fault_of_ours_is_raised_and_leaves_no_lease_behind(
    fault: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(num_pages=200, page_size=4)
    document = text(2, 64)
    world.serve(text(4, 7) + document + text(5, 20))
    free = world.pool.num_free

    def broken(*_: object) -> None:
        raise fault("a fault of ours")

    with monkeypatch.context() as during:
        if fault is IntegrityError:  # the one error of a copy that is never bad luck
            during.setattr(SlotMover, "move", broken)
        else:
            during.setattr("kvweave.fuzzy.backend.slots_of", broken)
        with pytest.raises(fault):
            world.cache.lease(world.view(text(6, 5) + document + text(7, 9)))
    world.check()
    assert world.pool.num_free == free


def test_a_donor_evicted_and_its_pages_refilled_is_no_donor() -> None:
    world = World(num_pages=32, page_size=4)
    document = text(1, 64)
    world.serve(text(2, 8) + document)
    world.cache.evict(32)
    world.serve(text(3, 120))  # into the same pages
    running = world.start(text(4, 5) + document[:40])
    assert running.lease.plan.spans == ()
    world.check()


def test_lending_counts_as_use() -> None:
    """Under LRU a donor that was just lent outlives what was used before."""
    world = World(num_pages=64, page_size=4)
    document = text(1, 64)
    world.serve(text(2, 8) + document)
    world.serve(text(3, 72))
    world.serve(text(4, 5) + document[:60] + text(5, 3))
    world.cache.evict(18)
    assert world.cache.match(world.view(text(2, 8) + document)) == 68
    assert world.cache.match(world.view(text(3, 72))) == 0


# Reporting.


def test_hits_are_counted_by_tier_and_once(world: World) -> None:
    head, document = text(1, 48), text(2, 64)
    world.serve(head + text(3, 16))
    world.serve(text(4, 7) + document + text(5, 16))
    prompt = head + text(6, 5) + document + text(7, 9)
    view = world.view(prompt)
    before = world.cache.stats().hit_tokens["exact"]
    for _ in range(3):  # tried, and put back for lack of room
        world.cache.release(world.cache.lease(view))
    running = world.admit(view)
    stats = world.cache.stats()
    assert stats.hit_tokens["exact"] - before == 48
    assert stats.hit_tokens["moved"] == running.lease.plan.served > 40
    assert stats.provider["asked"] == 6
