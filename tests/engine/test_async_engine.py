"""AsyncEngine: many clients, one engine on a thread of its own."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import aclosing

import pytest

from kvweave.engine.async_engine import AsyncEngine
from kvweave.engine.types import Completion
from kvweave.errors import EngineDeadError, OverloadedError, RequestError
from support.enginekit import (
    VOCABULARY,
    World,
    answer_of,
    collect,
    explode,
    make_world,
    oracle_answer,
    prompt,
    request,
    serving,
    until,
)
from support.faultkit import Sink


def hold(world: World) -> threading.Event:
    """Stops the engine's thread in its next forward pass until the event is set."""
    gate = threading.Event()
    world.runner.before = lambda batch: gate.wait(10)
    return gate


def test_answers_are_those_of_the_engine():
    async def main():
        world = make_world("radix")
        async with serving(world) as engine:
            prompts = [prompt(20, seed) for seed in range(8)]
            streams = [engine.generate(request(f"r{i}", p, 9)) for i, p in enumerate(prompts)]
            answers = await asyncio.gather(*map(answer_of, streams))
            for tokens, answer in zip(prompts, answers, strict=True):
                assert answer.token_ids == oracle_answer(tokens, 9)
                assert answer.finish_reason == "length"
            assert engine.snapshot().finished == 8
        world.assert_idle()

    asyncio.run(main())


def test_a_stream_ends_when_all_n_answers_have():
    async def main():
        world = make_world("radix")
        async with serving(world) as engine:
            asked = request("r", prompt(20, 1), 5, n=3)
            ended = [d.index async for d in engine.generate(asked) if d.finish_reason]
            assert sorted(ended) == [0, 1, 2]

    asyncio.run(main())


def test_problems_are_raised_at_once_and_not_by_the_first_look():
    async def main():
        world = make_world("radix", max_queued_requests=2)
        gate = hold(world)
        async with serving(world) as engine:
            with pytest.raises(RequestError, match="token id"):
                engine.generate(request("bad", [VOCABULARY], 1))
            streams = [engine.generate(request("r0", prompt(8, 0), 1))]
            await until(lambda: world.engine.scheduler.running)
            streams += [engine.generate(request(f"r{i}", prompt(8, i), 1)) for i in (1, 2)]
            with pytest.raises(RequestError, match="'r1' is running"):
                engine.generate(request("r1", prompt(8, 1), 1))
            with pytest.raises(OverloadedError):
                engine.generate(request("r3", prompt(8, 3), 1))
            gate.set()
            await asyncio.gather(*map(answer_of, streams))

    asyncio.run(main())


@pytest.mark.parametrize("how", ["close", "cancel", "forget", "never read"])
@pytest.mark.parametrize("tokens_seen", [0, 3])
def test_whoever_goes_away_leaves_nothing_behind(how, tokens_seen):
    async def main():
        world = make_world("radix")
        async with serving(world) as engine:
            stream = engine.generate(request("gone", prompt(20, 1), None))
            if how == "never read":
                del stream
            else:
                for _ in range(tokens_seen):
                    await anext(stream)
            if how == "close":
                async with aclosing(stream):
                    pass
                await stream.aclose()
            elif how == "cancel":
                task = asyncio.create_task(answer_of(stream))
                await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif how == "forget":
                del stream
                gc.collect()
            await until(lambda: engine.snapshot().aborted == 1)
            assert not world.engine.has_work
            stream = engine.generate(request("gone", prompt(20, 1), 3))
            assert (await answer_of(stream)).token_ids == oracle_answer(prompt(20, 1), 3)
        world.assert_idle()

    asyncio.run(main())


def test_a_step_in_flight_for_a_closed_stream_does_not_reach_the_next_of_its_name():
    async def main():
        world = make_world("radix")
        async with serving(world) as engine:
            gate = hold(world)
            old = engine.generate(request("same", prompt(20, 1), None))
            await until(lambda: world.runner.batches)  # the forward pass has begun
            await old.aclose()
            new = engine.generate(request("same", prompt(20, 2), 3))
            gate.set()
            assert (await answer_of(new)).token_ids == oracle_answer(prompt(20, 2), 3)
        world.assert_idle()

    asyncio.run(main())


def test_abort_ends_the_stream_of_whoever_reads_it():
    async def main():
        world = make_world("radix")
        async with serving(world) as engine:
            stream = engine.generate(request("r", prompt(20, 1), None, n=2))
            await anext(stream)
            engine.abort("r")
            engine.abort("unknown")
            reasons = [d.finish_reason async for d in stream if d.finish_reason]
            assert reasons == ["abort", "abort"]
        world.assert_idle()

    asyncio.run(main())


def test_flush_waits_for_idleness_as_long_as_it_may():
    async def main():
        world = make_world("radix")
        async with serving(world) as engine:
            await answer_of(engine.generate(request("warm", prompt(20, 1), 3)))
            assert engine.snapshot().cached_tokens > 0
            gate = hold(world)
            running = asyncio.create_task(
                answer_of(engine.generate(request("r", prompt(20, 1), 3)))
            )
            await until(lambda: world.engine.has_work)
            flush = asyncio.create_task(engine.flush_cache(timeout=10))
            await asyncio.sleep(0.05)
            assert not flush.done()
            gate.set()
            await running
            await flush
            await until(lambda: engine.snapshot().cached_tokens == 0)
            endless = engine.generate(request("endless", prompt(20, 1), None))
            await anext(endless)
            with pytest.raises(RequestError) as refused:
                await engine.flush_cache()
            assert refused.value.status == 409
            await endless.aclose()

    asyncio.run(main())


def test_a_dead_engine_answers_everybody_and_accepts_nobody():
    async def main():
        world = make_world("radix", max_running_requests=1)
        async with serving(world) as engine:
            assert engine.alive
            world.runner.before = lambda batch: 1 / 0
            streams = [engine.generate(request(f"r{i}", prompt(8, i), 3)) for i in range(9)]
            answers = await asyncio.gather(*map(answer_of, streams))
            assert {answer.finish_reason for answer in answers} == {"error"}
            await until(lambda: not engine.alive)
            with pytest.raises(EngineDeadError):
                engine.generate(request("late", prompt(8, 1), 3))

    asyncio.run(main())


def test_a_bug_in_the_engine_itself_leaves_nobody_waiting():
    async def main():
        world = make_world("radix")
        gate = hold(world)
        async with serving(world) as engine:
            stream = engine.generate(request("r", prompt(8, 1), 3))
            await until(lambda: world.engine.has_work)
            world.engine.scheduler.commit = world.engine.scheduler.end = None
            gate.set()
            with pytest.raises(EngineDeadError):
                await answer_of(stream)
            assert not engine.alive
            with pytest.raises(EngineDeadError):
                await engine.flush_cache()

    asyncio.run(main())


def test_gauges_that_cannot_be_read_stop_no_answer(monkeypatch):
    async def main():
        world = make_world("radix")
        async with serving(world) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(world.engine._reporter, "snapshot", explode)
                answer = await answer_of(engine.generate(request("r", prompt(20, 1), 5)))
                assert answer.token_ids == oracle_answer(prompt(20, 1), 5)
            await answer_of(engine.generate(request("s", prompt(20, 1), 5)))
            assert engine.snapshot().finished == 2

    asyncio.run(main())


def test_who_hears_that_the_cache_is_empty_also_sees_it(monkeypatch):
    async def main():
        world = make_world("radix")
        async with serving(world) as engine:
            await answer_of(engine.generate(request("r", prompt(20, 1), 5)))
            count = world.engine._reporter.snapshot

            def slowly():
                time.sleep(0.05)
                return count()

            monkeypatch.setattr(world.engine._reporter, "snapshot", slowly)
            await engine.flush_cache()
            assert engine.snapshot().cached_tokens == 0

    asyncio.run(main())


def test_an_answer_that_cannot_be_made_is_told_so_and_its_rid_is_free(monkeypatch):
    async def main():
        world = make_world("radix")
        async with serving(world) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(world.engine._maker, "make", explode)
                with pytest.raises(RuntimeError, match="injected"):
                    await answer_of(engine.generate(request("r", prompt(20, 1), 5, n=2)))
            assert not world.engine.has_work
            answer = await answer_of(engine.generate(request("r", prompt(20, 1), 5)))
            assert answer.token_ids == oracle_answer(prompt(20, 1), 5)
        world.assert_idle()

    asyncio.run(main())


def test_followers_that_cannot_be_told_farewell_leave_nobody_waiting(monkeypatch):
    async def main():
        world = make_world("radix", events=Sink())
        monkeypatch.setattr(world.engine.components.events, "close", explode)
        engine = AsyncEngine(world.engine)
        await engine.start()
        stream = engine.generate(request("r", prompt(8, 1), None))
        await until(lambda: world.engine.has_work)
        world.engine.scheduler.commit = world.engine.scheduler.end = None
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(answer_of(stream), 5)

    asyncio.run(main())


def test_stop_drains_then_aborts_and_refuses_newcomers():
    async def main():
        world = make_world("radix")
        engine = AsyncEngine(world.engine)
        assert not engine.alive
        await engine.start()
        gate = hold(world)
        short = asyncio.create_task(answer_of(engine.generate(request("s", prompt(8, 1), 3))))
        await until(lambda: world.engine.has_work)
        stopping = asyncio.create_task(engine.stop(drain_seconds=10))
        await asyncio.sleep(0.02)
        with pytest.raises(RequestError) as refused:
            engine.generate(request("late", prompt(8, 2), 3))
        assert refused.value.status == 503
        gate.set()
        assert (await short).finish_reason == "length"
        await stopping
        assert not engine.alive
        world.assert_idle()

        world = make_world("radix")
        engine = AsyncEngine(world.engine)
        await engine.start()
        endless = asyncio.create_task(answer_of(engine.generate(request("e", prompt(8, 1), None))))
        await until(lambda: engine.snapshot().running)
        await engine.stop()
        assert (await endless).finish_reason == "abort"
        world.assert_idle()

    asyncio.run(main())


def test_one_handover_per_step_and_loop_not_per_token(monkeypatch):
    async def main():
        world = make_world("radix")
        async with serving(world) as engine:
            loop = asyncio.get_running_loop()
            calls = []
            handover = loop.call_soon_threadsafe

            def count(callback, *args):
                calls.append(callback)
                return handover(callback, *args)

            monkeypatch.setattr(loop, "call_soon_threadsafe", count)
            gate = hold(world)
            streams = [engine.generate(request(f"r{i}", prompt(8, i), 20)) for i in range(8)]
            gate.set()
            await asyncio.gather(*map(answer_of, streams))
            assert len(calls) <= len(world.runner.batches) + 1

    asyncio.run(main())


def test_clients_on_several_loops_share_one_engine():
    world = make_world("radix")
    engine = AsyncEngine(world.engine)
    asyncio.run(engine.start())
    answers = {}

    def client(seed: int) -> None:
        async def main():
            stream = engine.generate(request(f"r{seed}", prompt(20, seed), 9))
            answers[seed] = (await answer_of(stream)).token_ids

        asyncio.run(main())

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(engine.stop())
    assert answers == {seed: oracle_answer(prompt(20, seed), 9) for seed in range(4)}


@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_a_third_of_which_vanishes(seed):
    async def main():
        import random

        rng = random.Random(seed)
        world = make_world("radix", pool_tokens=512, max_running_requests=8)
        async with serving(world) as engine:

            async def client(i: int) -> None:
                await asyncio.sleep(rng.random() * 0.1)
                tokens = prompt(10 + i % 7, i % 5)
                stream = engine.generate(request(f"c{i}", tokens, 12, n=1 + i % 2))
                if i % 3:
                    answers = {}
                    async for delta in stream:
                        collect(answers.setdefault(delta.index, Completion()), delta)
                    for answer in answers.values():
                        assert answer.token_ids == oracle_answer(tokens, 12)
                    return
                reading = asyncio.create_task(answer_of(stream) if i % 2 else anext(stream))
                await asyncio.sleep(rng.random() * 0.05)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                await stream.aclose()

            await asyncio.gather(*(client(i) for i in range(90)))
            await until(lambda: not world.engine.has_work)
        world.assert_idle()
        assert world.runner.violations == []

    asyncio.run(main())


def test_a_look_happens_between_two_steps_and_may_be_given_up():
    async def main():
        world = make_world("radix")
        gate = hold(world)
        async with serving(world) as engine:
            stream = engine.generate(request("r", prompt(20, 1), 3))
            await until(lambda: world.runner.batches)  # in a step, where it is held
            wasted = []
            given_up = asyncio.create_task(engine.run_on_engine_thread(wasted.append))
            looked = asyncio.create_task(
                engine.run_on_engine_thread(lambda seen: (seen, threading.get_ident()))
            )
            await asyncio.sleep(0.05)
            assert not looked.done()
            given_up.cancel()
            await asyncio.sleep(0)
            gate.set()
            seen, thread = await looked
            assert seen is world.engine
            assert thread != threading.get_ident()
            assert not wasted
            assert len((await answer_of(stream)).token_ids) == 3
        world.assert_idle()

    asyncio.run(main())
