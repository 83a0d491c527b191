"""Healing where it happens: in a served engine, between the requests of others."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvweave.engine import heal
from kvweave.engine.async_engine import AsyncEngine
from support.enginekit import World, answer_of, oracle_answer, prompt, request, serving, until
from support.movedkit import DOCUMENT, healing_world, wrapped


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heal, "CHUNK", 16)


def hold_healing(world: World) -> tuple[list[int], threading.Event]:
    """Notes the tokens of every pass that heals, and holds it until the event is set."""
    passes: list[int] = []
    gate = threading.Event()

    def wait(batch) -> None:
        if not len(batch.logits_at):
            passes.append(batch.tokens)
            gate.wait(10)

    world.runner.before = wait
    return passes, gate


async def serve_approximately(engine: AsyncEngine) -> list[int]:
    tokens = wrapped(2, DOCUMENT)
    for rid, each in (("donor", wrapped(1, DOCUMENT)), ("moved", tokens)):
        await answer_of(engine.generate(request(rid, each, 3)))
    return tokens


def test_a_served_engine_heals_by_itself_and_then_sleeps():
    async def main():
        world = healing_world()
        looks = []
        heal_once = world.engine.heal
        world.engine.heal = lambda wanted: looks.append(1) or heal_once(wanted)
        async with serving(world) as engine:
            tokens = await serve_approximately(engine)
            await until(lambda: engine.snapshot().healed == 1)
            await asyncio.sleep(0.02)
            looked = len(looks)
            await asyncio.sleep(0.1)
            assert len(looks) == looked
            again = await answer_of(engine.generate(request("again", tokens, 3)))
            assert again.usage.cached_tokens == (len(tokens) - 1) // 4 * 4
            assert again.token_ids == oracle_answer(tokens, 3)
        world.assert_idle()

    asyncio.run(main())


def test_a_request_interrupts_the_very_forward_pass_that_heals():
    async def main():
        world = healing_world()
        healing, gate = hold_healing(world)
        async with serving(world) as engine:
            await serve_approximately(engine)
            await until(lambda: healing)
            stream = engine.generate(request("real", prompt(30, 7), 3))
            passes = len(world.runner.batches)
            gate.set()
            assert (await answer_of(stream)).token_ids == oracle_answer(prompt(30, 7), 3)
            assert world.runner.batches[passes] == 30, "nothing else ran before it"
            await until(lambda: engine.snapshot().healed == 1)
            now = engine.snapshot()
            assert (now.heals_preempted, now.heals_dropped) == (1, 0)
            assert sum(healing) == now.healed_tokens + 16, "one chunk was lost, and came again"
        world.assert_idle()

    asyncio.run(main())


def test_stopping_does_not_wait_for_healing():
    async def main():
        world = healing_world()
        healing, gate = hold_healing(world)
        engine = AsyncEngine(world.engine)
        await engine.start()
        await serve_approximately(engine)
        await until(lambda: healing)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0.02)
        gate.set()
        await stopping
        now = world.engine.snapshot()
        assert (now.heals_waiting, now.healed_tokens, healing) == (1, 0, [16])
        world.assert_idle()

    asyncio.run(main())
