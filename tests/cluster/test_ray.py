"""Two real replicas under Ray Serve: `make test-ray` installs Ray and runs this."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from collections.abc import Iterator, Sized
from unittest.mock import AsyncMock, Mock

import pytest

from kvweave.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    FuzzyConfig,
    ModelConfig,
    SchedulerConfig,
)
from kvweave.engine.types import Completion, EngineSnapshot, GenerateRequest, SamplingParams
from kvweave.errors import ConfigError, EngineDeadError, RequestError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed; `make test-ray` does both",
    ),
]
GROUPS, TURNS = 6, 5


@pytest.fixture(scope="module")
def config(tiny_folder) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(tiny_folder("llama")), device="cpu"),
        cache=CacheConfig(prefix_cache_backend="fuzzy_match", max_total_tokens=8192),
        fuzzy=FuzzyConfig(self_check="off"),  # a random model would not pass
        scheduler=SchedulerConfig(max_running_requests=16),
    )


@pytest.fixture(scope="module")
def cluster(config) -> Iterator[Cluster]:
    from kvweave.cluster.app import running_engines

    with running_engines(config, ClusterConfig(replicas=2, cpus_per_replica=0.5)) as (engine, _):
        yield Cluster(engine)


class Cluster:
    """Calls of the replicas for tests outside any event loop."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self._handle = engine._handle

    def ask(self, *requests: GenerateRequest) -> list[Completion | Exception]:
        """Requests at the same time."""

        async def gather() -> list[Completion | Exception]:
            return await asyncio.gather(*map(self.answer, requests), return_exceptions=True)

        return asyncio.run(gather())

    async def answer(self, request: GenerateRequest) -> Completion:
        answer = Completion()
        async for delta in self.engine.generate(request):
            answer.extend(delta)
        return answer

    def snapshots(self) -> list:
        """Requests per replica, in a stable order while none dies."""
        answers = self._handle.broadcast("snapshot").results(timeout_s=30)
        return sorted(answers, key=lambda each: (each.requests, each.prefill_tokens))

    def requests(self) -> list[int]:
        return [each.requests for each in self.snapshots()]

    def flush(self) -> None:
        self._handle.broadcast("flush_cache", 10.0).results(timeout_s=30)


def request(rid: str, prompt: list[int], max_tokens: int = 4, **more) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(rid=rid, prompt_ids=tuple(prompt), sampling=sampling, **more)


def opening(group: int) -> list[int]:
    return [(7 * group + at * at) % 250 for at in range(90)]


def test_turns_land_with_their_group_and_groups_are_balanced(cluster):
    histories = [opening(group) for group in range(GROUPS)]
    reused = asked = 0
    for turn in range(TURNS):
        requests = [request(f"{g}.{turn}", history) for g, history in enumerate(histories)]
        for group, answer in enumerate(cluster.ask(*requests)):
            assert isinstance(answer, Completion), answer
            if turn:
                asked += len(histories[group])
                reused += answer.usage.cached_tokens
                # All but what was not yet a whole page, and the question.
                assert answer.usage.cached_tokens >= len(histories[group]) - 16 - 12
            histories[group] += [*answer.token_ids, *([group + turn] * 8)]
    assert cluster.requests() == [15, 15]
    assert reused / asked > 0.85


def test_moved_text_attracts_a_request_to_its_replica(cluster):
    cluster.flush()
    for group in range(4):
        cluster.ask(request(f"donor {group}", opening(group)))
    for group in range(4):
        [answer] = cluster.ask(request(f"moved {group}", [255, 3, *[group] * 9, *opening(group)]))
        assert answer.usage.moved_tokens >= 48, answer


def test_refusals_arrive_as_the_engine_made_them(cluster):
    [refused] = cluster.ask(request("long", [1] * 5000))
    assert type(refused) is RequestError
    assert (refused.status, refused.param) == (400, "prompt")
    assert "it may have 255" in str(refused)


def test_snapshots_add_mappings_key_by_key():
    from kvweave.cluster.replica import total

    one = EngineSnapshot(running=1, hit_tokens={"exact": 5}, paraphrase_refused={"facts": 2})
    other = EngineSnapshot(running=2, hit_tokens={"exact": 1, "moved": 3})
    added = total([one, other, one])
    assert (added.running, added.waiting) == (4, 0)
    assert added.hit_tokens == {"exact": 11, "moved": 3}
    assert added.paraphrase_refused == {"facts": 4}
    assert total([]) == EngineSnapshot()
    assert one.hit_tokens == {"exact": 5}


class Words:
    """A replica's streamed answer."""

    def __init__(self, words: str) -> None:
        self.words = iter(words.split())

    def __aiter__(self) -> Words:
        return self

    async def __anext__(self) -> str:
        for word in self.words:
            return word
        raise StopAsyncIteration

    def cancel(self) -> None:
        pass


def test_a_rid_in_use_is_refused_and_the_first_request_answered():
    """Replicas do not know each other's requests, so the server refuses the second one."""
    from kvweave.cluster.replica import RemoteEngine

    handle = Mock()
    handle.options.return_value.generate.remote.side_effect = lambda _: Words("it goes on")
    engine = RemoteEngine(handle, Mock())

    async def both() -> list[str]:
        first = engine.generate(request("same", [1]))
        said = [await first.__anext__()]
        with pytest.raises(RequestError, match="'same' is running") as refused:
            await engine.generate(request("same", [2])).__anext__()
        assert refused.value.param == "rid"
        return said + [word async for word in first]

    assert asyncio.run(both()) == ["it", "goes", "on"]
    assert asyncio.run(both()) == ["it", "goes", "on"]


def remote(*broadcasts):
    """A RemoteEngine whose broadcasts return, or raise, `broadcasts` in order."""
    from kvweave.cluster.replica import RemoteEngine

    def answer(*_, **__):
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    answers = iter(broadcasts)
    handle = Mock()
    handle.broadcast.return_value.results_async = AsyncMock(side_effect=answer)
    return RemoteEngine(handle, Mock())


def test_new_replicas_are_noticed_after_all_died(monkeypatch):
    from ray.serve.exceptions import DeploymentUnavailableError

    from kvweave.cluster import replica as module

    monkeypatch.setattr(module, "_REFRESH_SECONDS", 0.0)
    up, gone = [EngineSnapshot(running=1)], DeploymentUnavailableError(Mock())
    engine = remote(up, gone, ValueError("of some other kind"), up, *[up] * 10_000)

    async def states() -> list[bool]:
        seen = []
        await engine.start()
        while len(seen) < 3:
            if not seen or seen[-1] != engine.alive:
                seen.append(engine.alive)
            await asyncio.sleep(0)
        await engine.stop()
        return seen

    assert asyncio.run(asyncio.wait_for(states(), 20)) == [True, False, True]


@pytest.mark.parametrize("others", [True, False])
def test_one_hanging_replica_does_not_make_all_count_as_dead(others):
    engine = remote([EngineSnapshot(running=1), EngineSnapshot(running=2)], TimeoutError())
    failure = None if others else ConnectionError()
    engine._handle.snapshot.remote = AsyncMock(side_effect=failure)

    async def after() -> bool:
        await engine.start()
        await engine._refresh()
        await engine.stop()
        return engine.alive

    assert asyncio.run(after()) is others
    assert engine.snapshot().running == 3


def test_replicas_that_do_not_answer_give_503_with_a_sentence():
    from ray.serve.exceptions import DeploymentUnavailableError

    engine = remote(TimeoutError(), DeploymentUnavailableError(Mock()))
    for _ in range(2):
        with pytest.raises(RequestError, match="a replica does not answer") as refused:
            asyncio.run(engine.flush_cache())
        assert refused.value.status == 503
    nobody = Words("")
    nobody.words = map(Mock(side_effect=DeploymentUnavailableError(Mock())), "x")
    engine._handle.options.return_value.generate.remote.return_value = nobody
    with pytest.raises(RequestError, match="no replica is running") as refused:
        asyncio.run(engine.generate(request("x", [1])).__anext__())
    assert refused.value.status == 503


def test_finished_requests_are_no_load_and_leave_no_booking():
    """Broadcasts complete here too: the server asks each replica for its state every second."""
    from kvweave.cluster.app import OverlapRouter, _Booking, _Followed

    router = OverlapRouter.__new__(OverlapRouter)
    router.initialize_state()
    followed = Mock(spec=_Followed, view=Mock(), load=0)
    followed.book.side_effect = lambda booking: _Followed.book(followed, booking)
    followed.free.side_effect = lambda booking: _Followed.free(followed, booking)
    router._followed = {"A": followed}
    pending = Mock()
    pending.metadata.internal_request_id = "asked"
    router._book(pending, _Booking("A", Mock(), 100))
    assert followed.load == 100
    for at in range(100):
        router.on_request_completed("A", f"broadcast {at}")
    router.on_request_completed("B", "asked")  # refused there, and asked of A instead
    assert followed.load == 100
    router.on_request_completed("A", "asked")
    assert followed.load == 0
    assert [value for value in vars(router).values() if isinstance(value, Sized) and value] == [
        {"A": followed}
    ]


def test_an_engine_with_a_hanging_step_counts_as_dead(monkeypatch):
    from kvweave.cluster import replica as module

    monkeypatch.setattr(module, "_HANGS_AFTER", 0.05)
    replica = module.EngineReplica.__new__(module.EngineReplica)

    async def check() -> None:
        steps = asyncio.Event()

        async def run(at):
            await steps.wait()

        replica._engine = Mock(alive=True, run_on_engine_thread=Mock(side_effect=run))
        replica._answering, replica._asked = 0, None
        await replica.check_health()
        assert (
            not replica._engine.run_on_engine_thread.called
        )  # nobody waits: healing is not disturbed
        replica._answering = 1
        await replica.check_health()
        steps.set()
        await asyncio.sleep(0.1)
        await replica.check_health()  # it was answered, and is asked anew
        await asyncio.sleep(0)
        steps.clear()
        await replica.check_health()
        await asyncio.sleep(0.1)
        with pytest.raises(EngineDeadError, match="no step has ended for"):
            await replica.check_health()

    asyncio.run(check())


def test_a_disconnect_aborts_the_request(cluster):
    async def leave() -> None:
        stream = cluster.engine.generate(request("left", [5] * 40, 200))
        await stream.__anext__()
        await stream.aclose()

    asyncio.run(leave())
    until(lambda: sum(each.aborted for each in cluster.snapshots()) == 1)
    assert sum(each.running for each in cluster.snapshots()) == 0


def test_a_dead_replica_is_replaced_and_only_its_running_answers_are_lost(cluster):
    async def live_through_a_death() -> tuple[list, list]:
        await cluster.engine.start()
        first = [asyncio.create_task(cluster.answer(request(f"a{at}", [at] * 40, 150)))
                 for at in range(8)]  # fmt: skip
        await asyncio.sleep(0.3)  # all are being answered
        victim = replica_processes()[0]
        os.kill(victim, signal.SIGKILL)
        then = [cluster.answer(request(f"b{at}", [60 + at] * 40, 4)) for at in range(24)]
        after = await asyncio.gather(*then, return_exceptions=True)
        before = await asyncio.gather(*first, return_exceptions=True)
        await cluster.engine.stop()
        return before, after

    before, after = asyncio.run(live_through_a_death())
    assert [each for each in after if not isinstance(each, Completion)] == []
    lost = [each for each in before if not isinstance(each, Completion)]
    assert len(lost) < len(before)
    assert all(type(each) is RequestError and each.status == 503 for each in lost)
    until(lambda: len(cluster.snapshots()) == 2)
    answers = cluster.ask(*(request(f"c{at}", [130 + at] * 40) for at in range(8)))
    assert all(isinstance(each, Completion) for each in answers)
    assert min(cluster.requests()) >= 3  # the new one has an empty cache, so it is asked


def test_missing_cpus_are_refused_at_once(config, cluster):
    from kvweave.cluster.app import _check_room

    with pytest.raises(ConfigError, match="--replicas 900 need 900 CPUs, and Ray has"):
        _check_room(ClusterConfig(replicas=900))


def replica_processes() -> list[int]:
    import psutil  # Ray brings it

    mine = psutil.Process().children(recursive=True)
    return [each.pid for each in mine if "ServeReplica:kvweave:engine" in " ".join(each.cmdline())]


def until(holds, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_serve_run_takes_settings_as_texts_or_values():
    from kvweave.cluster.app import settings

    engine, replicas, server = settings(
        {"replicas": "2", "page_size": 32, "cold_group_wait": "false", "api_key": "k"}
    )
    assert (engine.cache.page_size, engine.cache.cold_group_wait) == (32, False)
    assert (replicas.replicas, server.api_key) == (2, "k")
    with pytest.raises(ConfigError, match="there is no setting 'pages'") as caught:
        settings({"pages": 1, "page_size": "x", "log_requests": "maybe"})
    assert len(caught.value.problems) == 3
    assert not server.hides_text
    *_, open_to_all = settings({})
    assert open_to_all.hides_text, "nobody here knows what Serve's proxies listen on"
    with pytest.raises(ConfigError, match="port is not set here, but in Ray's settings"):
        settings({"port": 8000})
