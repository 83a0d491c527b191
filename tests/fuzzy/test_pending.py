"""Tests of pending donors: waiting for text that another prompt is computing."""

from __future__ import annotations

import numpy as np

from kvweave.prefix.lease import Namespace
from support.fuzzy_world import SMALL, World, text


def overlapping(world: World) -> tuple[list[int], list[int]]:
    document = text(1, 160)
    return text(2, 7) + document + text(3, 8), text(4, 30) + document + text(5, 8)


def test_a_request_waits_for_moved_text_until_it_is_there(world: World) -> None:
    first, second = overlapping(world)
    asking = world.view(second)
    assert world.cache.pending_prefix(asking, 0) == 0
    producer = world.start(first)
    assert world.cache.pending_prefix(asking, 0) > 100
    assert world.compute(producer, 40)
    assert world.cache.pending_prefix(asking, 0) > 100
    assert world.compute(producer)
    assert world.cache.pending_prefix(asking, 0) == 0
    assert world.admit(asking).lease.plan.served > 140


def test_a_donor_that_is_gone_or_will_not_publish_is_not_waited_for(world: World) -> None:
    first, second = overlapping(world)
    asking = world.view(second)
    producer = world.start(first)
    assert world.cache.pending_prefix(world.view(second, Namespace("other")), 0) == 0
    assert world.cache.pending_prefix(world.view(second, fuzzy=False), 0) == 0
    assert world.cache.pending_prefix(world.view(second, max_exact=0), 0) == 0
    world.finish(producer)
    assert world.cache.pending_prefix(asking, 0) == 0


def test_an_approximate_donor_is_waited_for_in_its_exact_part_only(world: World) -> None:
    head, document = text(1, 48), text(2, 64)
    world.serve(text(3, 7) + document + text(4, 16))
    producer = world.start(head + document + text(5, 40))
    assert producer.lease.plan.publishable(128) == 48
    asking = world.view(head + document + text(5, 40))
    assert world.cache.pending_prefix(asking, 0) == 48
    assert world.compute(producer)
    assert world.cache.match(asking) == 48
    assert world.cache.pending_prefix(asking, 48) == 0


def test_little_is_not_waited_for(world: World) -> None:
    document = text(1, 160)
    world.start(text(2, 7) + document)
    short = 4 * SMALL.min_span
    assert (
        world.cache.pending_prefix(world.view(text(3, 5) + document[: short - 1] + text(4, 5)), 0)
        == 0
    )
    assert world.cache.pending_prefix(world.view(text(3, 5) + document[:short] + text(4, 5)), 0) > 0
    # A small part of much that has to be computed anyway.
    assert world.cache.pending_prefix(world.view(document[:short] + text(4, 4 * short)), 0) == 0


def test_waiting_can_be_switched_off() -> None:
    world = World(512, 4, wait_for_pending=False)
    first, second = overlapping(world)
    world.start(first)
    assert world.cache.pending_prefix(world.view(second), 0) == 0


def test_what_is_cached_already_is_not_waited_for(world: World) -> None:
    first, second = overlapping(world)
    world.serve(first)
    world.start(second[:3] + second)  # itself served from the first
    assert world.cache.pending_prefix(world.view(text(9, 44) + second[30:]), 0) == 0
    world.start(text(8, 5) + second, fuzzy=False)  # computes what it might have been lent
    assert world.cache.pending_prefix(world.view(text(9, 44) + second[30:]), 0) == 0


def test_a_pending_prefix_counts_as_a_prefix(world: World) -> None:
    prompt = text(1, 128)
    world.start(prompt)
    asking = world.view(prompt[:96] + text(2, 32))
    assert world.cache.pending_prefix(asking, 0) == 96
    assert np.array_equal(asking.tokens[:96], prompt[:96])
