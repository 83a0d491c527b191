"""A router's view of a replica, compared with the hits of the replica's cache."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvweave.cluster.overlap import Keying, Overlap, PromptKeys, ReplicaView
from kvweave.fuzzy.matcher import block_hashes
from kvweave.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvweave.prefix.hash_index import namespace_seed
from kvweave.prefix.lease import Namespace, RequestView
from support.enginekit import make_world, prompt, random_request, request
from support.movedkit import DOCUMENT, fuzzy_world, wrapped


class Sink:
    """An EventSink that feeds an engine's events to a view."""

    dropped = 0

    def __init__(self, page_size: int, stride: int = 16) -> None:
        self.keying = Keying("oracle", page_size, stride)
        self.view = ReplicaView(self.keying)

    def publish(self, events) -> None:
        self.view.apply(events)

    def close(self) -> None: ...

    def overlap(self, tokens, salt=None) -> Overlap:
        return self.view.overlap(PromptKeys(np.array(tokens, np.int32), salt, self.keying))


@pytest.mark.parametrize("backend", ["hash", "radix"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_exact_overlap_equals_the_caches_hit(backend, page_size):
    rng = np.random.default_rng(page_size)
    sink = Sink(page_size)
    world = make_world(backend, page_size=page_size, pool_tokens=384, events=sink)
    for turn in range(60):
        world.run(random_request(rng, str(turn)), check=False, limit=400)
        asked = random_request(rng, "asked")
        tokens = np.array(asked.prompt_ids, np.int32)
        view = RequestView("asked", tokens, Namespace("oracle", salt=asked.cache_salt))
        expected = world.engine.cache.match(view)
        assert sink.overlap(tokens, asked.cache_salt).exact == expected
    assert world.engine.snapshot().evicted_tokens > 0


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_moved_text_is_found_at_any_offset(page_size):
    sink = Sink(page_size)
    world = make_world("radix", page_size=page_size, events=sink)
    document = prompt(200, 1)
    world.run(request("donor", prompt(21, 2) + document + prompt(30, 3)))
    assert sink.overlap(prompt(300, 4)) == Overlap(0, 0)
    for before in (0, 5, 33):
        moved = sink.overlap(prompt(before, 5) + document + prompt(9, 6)).moved
        assert 200 - 2 * (16 + page_size) <= moved <= 200
    half = sink.overlap(prompt(3, 7) + document[:100] + prompt(50, 8)).moved
    assert 100 - 2 * (16 + page_size) <= half <= 100


@pytest.mark.parametrize(("page_size", "stride"), [(1, 1), (1, 7), (4, 16), (4, 6), (16, 4)])
@pytest.mark.parametrize("pages_told_at_once", [1, 3, 40])
def test_each_stride_has_an_anchor_for_any_grouping_of_events(
    page_size, stride, pages_told_at_once
):
    view = ReplicaView(Keying("m", page_size, stride))
    tokens = prompt(40 * page_size, 1)
    for first in range(0, 40, pages_told_at_once):
        names = tuple(range(first, min(40, first + pages_told_at_once)))
        told = tuple(tokens[first * page_size : (names[-1] + 1) * page_size])
        view.apply([BlockStored(names, first - 1 if first else None, told, page_size)])
    anchors = block_hashes(np.array(tokens, np.int32), stride, namespace_seed(Namespace("")))
    assert view._anchors == Counter(anchors.tolist())
    for name in range(40):
        view.apply([BlockRemoved((name,))])
    assert view._anchors == {}


def test_text_behind_the_exact_prefix_counts_once():
    sink = Sink(4)
    world = make_world("radix", events=sink)
    tokens = prompt(120, 1)
    world.run(request("donor", tokens, 1))
    assert sink.overlap(tokens) == Overlap(116, 0)
    assert sink.overlap(tokens + tokens) == Overlap(120, 112)


def test_the_moved_overlap_is_close_to_the_backends():
    sink = Sink(4, stride=4)
    world = fuzzy_world(events=sink)
    world.run(request("donor", wrapped(1, DOCUMENT)))
    tokens = wrapped(2, DOCUMENT)
    believed = sink.overlap(tokens)
    world.run(request("moved", tokens))
    usage = world.answers["moved", 0].usage
    assert (believed.exact, usage.cached_tokens) == (0, 0)
    assert abs(believed.moved - usage.moved_tokens) <= 8


def test_salts_share_nothing():
    sink = Sink(4)
    world = make_world("radix", events=sink)
    tokens = prompt(80, 1)
    world.run(request("donor", tokens, 1, salt="a"))
    assert sink.overlap(tokens, "a").exact == 76
    for other in (None, "", "b"):
        assert sink.overlap(tokens, other) == Overlap(0, 0)
        assert sink.overlap([*prompt(3, 9), *tokens], other) == Overlap(0, 0)
    assert sink.overlap([*prompt(3, 9), *tokens], "a").moved > 40


def test_evicted_and_cleared_blocks_are_forgotten():
    sink = Sink(4)
    world = make_world("radix", events=sink, pool_tokens=256)
    tokens = prompt(100, 1)
    world.run(request("donor", tokens, 1))
    world.run(*(request(str(at), prompt(120, 10 + at), 1) for at in range(4)))
    assert sink.overlap(tokens) == Overlap(0, 0)
    assert sink.view.kept == world.engine.snapshot().cached_tokens
    world.engine.flush_cache()
    assert (sink.view.blocks, sink.view.kept) == (frozenset(), 0)
    assert sink.view._anchors == {}


def test_running_requests_count_until_their_end():
    sink = Sink(4)
    keys = PromptKeys(np.array(prompt(50, 1), np.int32), None, sink.keying)
    sink.view.expect(keys)
    sink.view.expect(keys)
    assert sink.view.overlap(keys).exact == 48
    sink.view.unexpect(keys)
    assert (sink.view.overlap(keys).exact, sink.view.kept) == (48, 48)
    sink.view.unexpect(keys)
    assert (sink.view.overlap(keys).exact, sink.view.kept) == (0, 0)


def test_events_after_a_loss_do_no_harm():
    view = ReplicaView(Keying("m", 2, 4))
    tokens = tuple(range(8))
    view.apply([BlockStored((5, 6), 77, tokens[:4], 2), BlockRemoved((1, 2))])
    view.apply([BlockStored((5, 6, 7), 77, tokens[:6], 2)])  # told twice
    view.apply([BlockRemoved((5,)), BlockStored((8,), 5, tokens[6:], 2)])
    assert view.blocks == {6, 7, 8}
    view.apply([BlockRemoved((6, 7, 8, 8))])
    assert (view.blocks, view._anchors) == (frozenset(), {})
    view.apply([AllBlocksCleared()])


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 18])
def test_short_prompts_have_little_to_overlap(length):
    sink = Sink(16)
    world = make_world("radix", page_size=16, events=sink)
    tokens = prompt(18, 1)
    world.run(request("donor", tokens, 20))
    assert sink.overlap(tokens[:length]).exact == (length - 1) // 16 * 16
