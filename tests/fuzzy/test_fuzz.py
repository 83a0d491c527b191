"""Random operations on the whole cache; each slot is compared with what it must hold."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from kvweave.prefix.lease import Namespace
from support.fuzzy_world import SMALL, Running, World

NAMESPACES = [Namespace("m"), Namespace("m", salt=""), Namespace("m", salt="a")]


class Traffic:
    """Prompts glued from a few texts, so that they overlap at any place, and their random fates."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        rng = np.random.default_rng(seed)
        self.texts = [rng.integers(0, 9000, int(n)).tolist() for n in rng.integers(10, 90, 6)]
        self.texts += [[7] * 40, [1, 2, 3] * 15]
        self.heads = [rng.integers(0, 9000, 9).tolist() for _ in range(3)]

    def prompt(self) -> list[int]:
        tokens = list(self.random.choice([*self.heads, []]))
        for _ in range(self.random.randint(1, 4)):
            text = self.random.choice(self.texts)
            begin = self.random.randrange(len(text))
            tokens += text[begin : begin + self.random.randint(5, 80)]
            tokens += [self.random.randrange(9000) for _ in range(self.random.randint(0, 3))]
        return tokens or [1]

    def step(self) -> None:
        world, pick = self.world, self.random
        action = pick.choices(
            [
                "start",
                "compute",
                "decode",
                "end",
                "resume",
                "evict",
                "fail",
                "again",
                "close",
                "turn",
            ],
            [5, 12, 4, 3, 2, 1, 1, 2, 0.2, 4],
        )[0]
        one = pick.choice(world.live) if world.live else None
        if len(world.live) > 5:
            action = "end"
        if action == "start":
            world.start(
                self.prompt(),
                pick.choice(NAMESPACES),
                fuzzy=pick.random() < 0.9,
                max_exact=0 if pick.random() < 0.05 else None,
                session=pick.choice([None, None, "s", "t"]),
            )
        elif action == "evict":
            world.cache.evict(pick.randint(1, 12))
        elif action == "fail":
            world.mover.fail_next = True
        elif one is None:
            return
        elif action == "compute":
            if not world.compute(one, pick.randint(1, 150)):
                self.make_room(one)
        elif action == "decode":
            if world.compute(one):
                one.tokens.append(pick.randrange(9000))
            else:
                self.make_room(one)
        elif action == "end":
            world.finish(one, well=pick.random() < 0.8)
        elif action == "turn":
            # The same conversation goes on behind another head.
            if not world.compute(one):
                return self.make_room(one)
            world.finish(one, well=True)
            said = [pick.randrange(9000) for _ in range(pick.randint(10, 30))]
            tokens = [*pick.choice(self.heads), *one.tokens[pick.randrange(12) :][-160:], *said]
            world.start(tokens, one.view.namespace, session=one.view.session)
        elif action == "close":
            world.cache.close_session(pick.choice(NAMESPACES), pick.choice(["s", "t"]))
        elif action == "again":
            world.start(one.view.tokens, one.view.namespace, session=one.view.session)
        elif action == "resume":
            # Preempted, and back with its output as part of the prompt.
            world.finish(one)
            more = {"fuzzy": one.view.fuzzy, "session": one.view.session}
            world.start(one.tokens, one.view.namespace, **more)

    def make_room(self, wanting: Running) -> None:
        """As an engine would: somebody has to go."""
        self.world.finish(self.random.choice(self.world.live))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 600), (4, 150), (16, 48)])
def test_every_slot_holds_what_it_must(seed: int, page_size: int, num_pages: int) -> None:
    policy = ("lru", "lfu", "slru", "priority")[seed % 4]
    config = replace(SMALL, share_span=page_size if seed in (0, 3) else 0)
    world = World(num_pages, page_size, config, eviction=policy, events=seed % 2 == 0)
    traffic, lent, shared = Traffic(world, seed), 0, 0
    for _ in range(600):
        traffic.step()
        world.check()
        shared += sum(len(run.lease.shared) for run in world.live)
        lent += sum(span.generation > 0 for run in world.live for span in run.lease.plan.spans)
    assert lent > 30, "too little was lent within sessions for this test to mean anything"
    assert shared > 100 if config.share_span else shared == 0
    moved = world.cache.stats().hit_tokens["moved"]
    assert moved > 300, "too little was moved for this test to mean anything"
    assert world.cache.counters.evicted_pages > 0
    assert world.cache.stats().provider["raised"] == 0
    assert world.cache.stats().provider["refused"] == 0
    while world.live:
        world.finish(world.live[0])
    world.check()
    world.cache.reset()
    world.check()
    assert world.pool.num_free == num_pages
    assert world.cache.stats().provider["anchors"] == 0
