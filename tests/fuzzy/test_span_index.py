"""Tests of the span index over a real tree: what it always finds and never claims."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.anchors import SpanIndex
from kvweave.fuzzy.donors import DonorTree
from kvweave.fuzzy.matcher import PLACES_TRIED
from kvweave.fuzzy.planner import plan_spans
from kvweave.fuzzy.provider import Candidate
from kvweave.prefix.lease import Namespace, RequestView
from kvweave.prefix.tree import RadixTree
from kvweave_bench.workloads.oracle import shared_positions
from support.fuzzy_world import HERE, joined, text


class Store:
    """Donors in a tree, and the index over it. Pages that were freed are handed out again."""

    def __init__(
        self, page_size: int = 4, stride: int = 4, num_pages: int = 512, budget_ms: float = 1e6
    ) -> None:
        self.size, self.stride = page_size, stride
        self.tree = RadixTree(page_size)
        self.donors = DonorTree(self.tree, num_pages)
        self.config = FuzzyConfig(
            stride=stride,
            min_span=2 * stride,
            sink_tokens=0,
            min_suffix=1,
            min_reuse_ratio=0,
            time_budget_ms=budget_ms,
        )
        self.index = SpanIndex(self.donors, self.config)
        self.donors.listener = self.index
        self.looks = 0
        self.free = list(range(num_pages))

    def add(self, tokens: Sequence[int], namespace: Namespace = HERE, chunk: int = 10**6) -> None:
        """Publish whole pages of `tokens`, some at a time."""
        node = self.tree.root(namespace)
        self.tree.lock(node)
        pages = len(tokens) // self.size
        for first in range(0, pages, chunk):
            many = min(chunk, pages - first)
            part = tokens[first * self.size : (first + many) * self.size]
            mine, self.free = self.free[:many], self.free[many:]
            node, held = self.tree.extend(node, np.array(part, np.int32), np.array(mine, np.int32))
            self.free += mine[: len(held)]
        self.tree.unlock(node)
        self.index.anchors.check()

    def evict(self, pages: int) -> None:
        for run in self.tree.evict(pages):
            self.free += run.tolist()
        self.index.anchors.check()
        self.donors.check(self.tree)

    def find(self, tokens: Sequence[int], namespace: Namespace = HERE) -> list[Candidate]:
        view = RequestView("r", np.array(tokens, np.int32), namespace)
        around = self.donors.run_around

        def counted(*arguments: object) -> Candidate | None:
            self.looks += 1
            return around(*arguments)  # type: ignore[arg-type]

        self.donors.run_around = counted  # type: ignore[method-assign]
        found = self.index.match(view, 0)
        self.donors.run_around = around  # type: ignore[method-assign]
        for run in found:
            path = self.donors.tokens(run.page)
            assert path[run.donor_start : run.donor_end].tolist() == list(
                tokens[run.start : run.end]
            )
        return list(found)

    def spans(self, tokens: Sequence[int], namespace: Namespace = HERE) -> list[tuple[int, int]]:
        return sorted((run.start, run.end) for run in self.find(tokens, namespace))


@pytest.mark.parametrize("page_size", [1, 4, 6, 16])
@pytest.mark.parametrize("stride", [1, 3, 4, 16])
def test_every_run_of_twice_the_stride_less_one_is_found_at_any_shift(
    page_size: int, stride: int
) -> None:
    shortest = 2 * stride - 1
    store = Store(page_size, stride, num_pages=1024)
    length = 4 * max(page_size, stride) + shortest
    donors = [text(seed, length - length % page_size) for seed in range(5)]
    for donor in donors:
        store.add(donor, chunk=3)
    for start in range(0, len(donors[0]) - shortest, max(1, stride // 4)):
        prompt, expected = text(99, start % 7), []
        for seed, donor in enumerate(donors):
            expected.append((len(prompt), len(prompt) + shortest))
            prompt += donor[start : start + shortest] + text(100 + seed, 1 + (start + seed) % 5)
        assert store.spans(prompt) == expected


@pytest.mark.parametrize("seed", range(8))
def test_prompts_glued_from_pieces_are_served_as_far_as_an_exhaustive_search_says(
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    store = Store((1, 4, 16)[seed % 3], stride=8, num_pages=9000)
    texts = [text(1000 + each, 400) for each in range(8)]
    donors = []
    for _ in range(8):
        chosen = [texts[at] for at in rng.choice(8, 3)]  # the same text stands in many donors
        donor = joined(*(one[int(rng.integers(150)) :] for one in chosen))
        donors.append(donor[: len(donor) // store.size * store.size])
        store.add(donors[-1])
    prompt: list[int] = []
    while len(prompt) < 3000:
        piece, start = texts[rng.integers(8)], int(rng.integers(350))
        prompt += piece[start : start + int(rng.integers(10, 300))]
    runs = store.find(prompt)
    pieces = plan_spans(runs, len(prompt), 0, store.config)
    served = sum(piece.length for piece in pieces)
    arrays = [np.array(donor, np.int32) for donor in donors]
    possible = shared_positions(np.array(prompt, np.int32), arrays, store.config.min_span)
    assert served >= 0.97 * possible.sum()
    assert store.looks < 6 * len(pieces) + 20


def test_a_run_goes_on_through_parents_and_children() -> None:
    store = Store(page_size=4, stride=4)
    shared, left, right = text(1, 40), text(2, 40), text(3, 40)
    store.add(shared + left)
    store.add(shared + right)  # splits the first path
    assert store.spans([9, *shared[5:], *right[:30], 9]) == [(1, 66)]
    assert store.spans([9, *shared[5:], *left[:30], 9]) == [(1, 66)]


def test_a_run_ends_in_the_middle_of_the_child_page_that_agrees_longest() -> None:
    store = Store(page_size=16, stride=16, num_pages=64)
    shared = text(1, 48)
    for seed in range(5):
        store.add(shared + text(seed + 10, 16))
    found = store.spans([9, 9, *shared, *text(13, 16)[:11], 9, 9])
    assert found == [(2, 2 + 48 + 11)]


def test_evicted_text_is_not_found_and_its_parents_still_are() -> None:
    store = Store(page_size=4, stride=4, num_pages=40)
    donor = text(1, 80)
    store.add(donor)
    prompt = [9, *donor, 9]
    store.evict(7)
    assert store.spans(prompt) == [(1, 1 + 52)]
    store.add(text(2, 108))  # takes the pages over
    assert store.spans(prompt) == [(1, 1 + 52)]
    store.evict(99)
    assert store.spans(prompt) == []
    assert len(store.index.anchors) == 0


def test_the_older_copy_is_found_when_the_newer_ones_are_gone() -> None:
    """However many copies there were: none costs another its anchor."""
    store = Store(page_size=4, stride=4)
    common = text(1, 40)
    store.add(common + text(50, 4))
    node = store.tree.find(HERE, np.array(common + text(50, 4), np.int32))
    assert node is not None
    store.tree.lock(node.node)
    for seed in range(30):
        store.add(text(100 + seed, 4) + common)
    store.evict(10**6)
    assert store.spans([9, 9, *common, 9]) == [(2, 42)]


def test_of_many_copies_the_longest_of_the_newest_is_taken() -> None:
    store = Store(page_size=4, stride=4)
    body = text(1, 80)
    for seed, (start, end) in enumerate([(0, 80), (20, 60), (10, 70), (30, 50)]):
        store.add(text(10 + seed, 4) + body[start:end])
    assert max(store.spans([9, *body, 9])) == (1, 81)


def test_a_constant_text_is_found_whole_in_a_few_looks() -> None:
    store = Store(page_size=16, stride=16, num_pages=2048)
    store.add([5] * 8192)
    assert store.spans([1, *[5] * 8000, 2]) == [(1, 8001)]
    assert store.looks <= PLACES_TRIED


def test_a_periodic_text_is_found_in_a_few_looks_from_many_donors() -> None:
    store = Store(page_size=16, stride=16, num_pages=4096)
    beat = text(1, 24)
    for seed in range(20):
        store.add(text(10 + seed, 16) + beat * 60)
    [(start, end)] = store.spans([1, *beat * 40, 2])
    assert (start, end) == (1, 961)
    assert store.looks <= PLACES_TRIED


def test_looking_stops_in_time_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    store = Store(budget_ms=2 * 3500)  # half of it for looking, at a made-up second a look
    for seed in range(6):
        store.add(text(seed, 20))
    prompt = joined(*([*text(seed, 20), 9] for seed in range(6)))
    assert store.spans(prompt) == [(63, 83), (84, 104), (105, 125)]


def test_namespaces_do_not_meet() -> None:
    store = Store()
    donor = text(1, 80)
    spaces = [Namespace("m"), Namespace("m", salt=""), Namespace("m", adapter="a", salt="b")]
    others = [Namespace("n"), Namespace("m", adapter=""), Namespace("m", adapter="ab")]
    for space in spaces:
        store.add(donor, space)
    for space in spaces:
        assert store.spans([9, *donor, 9], space) == [(1, 81)]
    for space in others:
        assert store.spans([9, *donor, 9], space) == []
    assert store.looks == len(spaces)


def test_hashes_that_lie_find_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one hash for all windows everything is nominated, and all is still compared."""

    def blocks(tokens: np.ndarray, width: int, seed: int) -> np.ndarray:
        return np.full(len(tokens) // width, 77, np.uint64)

    def windows(tokens: np.ndarray, width: int, seed: int) -> np.ndarray:
        return np.full(len(tokens) - width + 1, 77, np.uint64)

    monkeypatch.setattr("kvweave.fuzzy.matcher.block_hashes", blocks)
    monkeypatch.setattr("kvweave.fuzzy.anchors.window_hashes", windows)
    store = Store()
    store.add(text(1, 80))
    store.add(text(2, 80), Namespace("other"))
    assert store.spans([9, *text(3, 80), 9]) == []
    assert store.spans([9, *text(2, 80), 9]) == []
    assert store.looks == 2 * 79 * PLACES_TRIED
    store.evict(999)
    assert len(store.index.anchors) == 0


def test_exact_prefixes_are_not_looked_for() -> None:
    store = Store()
    donor = text(1, 80)
    store.add(donor)
    view = RequestView("r", np.array(donor + [9] * 9, np.int32), HERE)
    assert store.index.match(view, 80) == []


def test_a_stride_may_be_any_number() -> None:
    store = Store(page_size=16, stride=7)
    donor = text(1, 160)
    store.add(donor, chunk=1)
    assert len(store.index.anchors) == 160 // 7
    assert store.spans([9, *donor, 9]) == [(1, 161)]
