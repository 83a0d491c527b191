"""An engine over moved text: prompts that share documents, with and without healing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvweave.fuzzy.backend import FuzzyCache
from kvweave.kv.pool import PagePool
from kvweave.prefix.contract import CacheOptions
from support.enginekit import FAMILIES, World, make_world, prompt, request
from support.fuzzy_world import SMALL

DOCUMENT = prompt(120, 1)


def fuzzy_world(page_size: int = 4, *, share_span: int = 8, **options) -> World:
    def make_cache(pool: PagePool, given: CacheOptions, mover) -> FuzzyCache:
        return FuzzyCache(pool, replace(given, fuzzy=replace(SMALL, share_span=share_span)), mover)

    return make_world(make_cache=make_cache, page_size=page_size, **options)


def wrapped(seed: int, *documents: list[int]) -> list[int]:
    """Documents behind, between and before other text."""
    tokens = prompt(5 + seed % 7, 1000 + seed)
    for at, document in enumerate(documents):
        tokens += document + prompt(3 + (seed + at) % 5, 2000 + 10 * seed + at)
    return tokens


def overlapping_request(rng: np.random.Generator, rid: str):
    tokens = prompt(int(rng.integers(1, 12)), int(rng.integers(20)))
    for _ in range(int(rng.integers(0, 4))):
        family, start = FAMILIES[rng.integers(len(FAMILIES))], int(rng.integers(80))
        tokens += family[start : start + int(rng.integers(1, 90))]
        tokens += prompt(int(rng.integers(0, 4)), int(rng.integers(1000)))
    sampling = {}
    if rng.random() < 0.15:
        sampling["prompt_logprobs"] = 1
    if rng.random() < 0.2:
        sampling["n"] = int(rng.integers(2, 4))
    return request(
        rid,
        tokens,
        int(rng.choice([1, 3, 20, 60])),
        priority=int(rng.choice([0, 0, 0, 1, -1])),
        salt=str(rng.choice(["", "a"])) if rng.random() < 0.2 else None,
        fuzzy=rng.random() < 0.9,
        **sampling,
    )


HEALING = replace(SMALL, heal=True, share_span=8)


def healing_world(page_size: int = 4, *, most: int = 256, **options) -> World:
    fuzzy = replace(HEALING, heal_queue=most)
    return make_world("fuzzy_match", page_size=page_size, fuzzy=fuzzy, **options)


def served_approximately(world: World, seed: int = 2, rid: str = "moved", **more) -> list[int]:
    """Answer a prompt from moved KV; returns the prompt."""
    world.run(request(f"donor of {rid}", wrapped(1, DOCUMENT), **more))
    tokens = wrapped(seed, DOCUMENT)
    world.run(request(rid, tokens, 6, **more))
    assert world.answers[rid, 0].usage.moved_tokens > 90
    return tokens
