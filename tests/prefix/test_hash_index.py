"""Block hashes, and collisions between two paths."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.prefix.contract import CacheOptions
from kvweave.prefix.hash import HashCache
from kvweave.prefix.hash_index import Hasher, HashIndex, namespace_seed, page_hashes, xxh3
from kvweave.prefix.lease import Namespace
from support.prefix_world import NS, Chaos, World, tokens_of


class CollidingWorld(World):
    """A hash cache whose hashes collide: it keeps less than it could, so it says itself how much.

    KV that it serves is compared with the model as ever.
    """

    def __init__(self, page_size: int, num_pages: int, hasher: Hasher) -> None:
        super().__init__("hash", page_size, num_pages)
        self.cache = HashCache(self.pool, CacheOptions(), hasher)
        self.lossy = True


def worse(values: int) -> Hasher:
    """xxh3, of which only that many values are left."""
    return lambda data, seed: xxh3(data, seed) % values


@pytest.mark.parametrize("values", [1, 2, 5, 40])
@pytest.mark.parametrize("page_size", [1, 16])
def test_collisions_cost_hits_and_never_serve_wrong_kv(page_size: int, values: int) -> None:
    world = CollidingWorld(page_size, 12, worse(values))
    chaos = Chaos(world, np.random.default_rng(values))
    for _ in range(1_000):
        chaos.step()
    assert 0 < world.cache.cached_pages <= values


def test_a_collision_neither_overwrites_nor_deletes_the_entry_that_was_there() -> None:
    world = CollidingWorld(2, 16, worse(1))
    world.serve([1, 2, 3])
    client = world.run([8, 9, 3])
    assert world.match([8, 9, 3]) == 0
    assert world.match([1, 2, 3]) == 2
    client.release()
    world.check()
    assert world.match([1, 2, 3]) == 2
    world.evict(1)
    world.serve([8, 9, 3])
    assert world.match([8, 9, 3]) == 2
    world.check()


def test_a_colliding_namespace_is_still_another_namespace() -> None:
    world = CollidingWorld(2, 16, worse(1))
    world.serve([1, 2, 3], Namespace("m", salt="mine"))
    assert world.match([1, 2, 3], Namespace("m", salt="theirs")) == 0
    assert world.match([1, 2, 3], Namespace("m", salt="mine")) == 2


def test_equal_tokens_behind_another_parent_are_another_page() -> None:
    """Hashes that forget the parent: only the parent's identity tells the two apart."""
    index = HashIndex(8, 1, hasher=lambda data, seed: sum(data))
    index.extend(NS, -1, tokens_of([1, 2]), tokens_of([0, 1]))
    index.extend(NS, -1, tokens_of([3]), tokens_of([2]))
    assert index.find(NS, tokens_of([1, 2])).tolist() == [0, 1]
    assert index.find(NS, tokens_of([3, 2])).tolist() == [2]


def test_hashes_are_the_same_in_every_process() -> None:
    program = (
        "import numpy as np\n"
        "from kvweave.prefix.lease import Namespace\n"
        "from kvweave.prefix.hash_index import namespace_seed, page_hashes\n"
        "seed = namespace_seed(Namespace('m', 'a', 's'))\n"
        "print(list(page_hashes(np.arange(64, dtype=np.int32), 16, seed)))"
    )
    here = list(page_hashes(tokens_of(range(64)), 16, namespace_seed(Namespace("m", "a", "s"))))
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ran = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True
        )
        assert ran.stdout.decode().strip() == str(here)


fields = st.none() | st.text(alphabet="ab\0=é\ud800", max_size=3)
namespaces = st.builds(Namespace, st.text(alphabet="ab=", max_size=3), fields, fields)


@given(namespaces, namespaces)
def test_every_field_of_a_namespace_counts(a: Namespace, b: Namespace) -> None:
    assert (namespace_seed(a) == namespace_seed(b)) == (a == b)


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 8), st.integers(0, 5))
def test_a_path_can_be_continued_anywhere(tokens: list[int], page_size: int, cut: int) -> None:
    whole = list(page_hashes(tokens_of(tokens), page_size, 7))
    assert len(whole) == len(tokens) // page_size
    head = whole[:cut]
    rest = tokens_of(tokens[len(head) * page_size :])
    assert head + list(page_hashes(rest, page_size, head[-1] if head else 7)) == whole


def test_a_hash_depends_on_all_that_precedes_its_page() -> None:
    tokens = tokens_of(range(8))
    changed = tokens.copy()
    changed[0] = 9
    here, there = (list(page_hashes(at, 2, 0)) for at in (tokens, changed))
    assert not set(here) & set(there)
