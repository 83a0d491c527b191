"""The server over the real engine and caches, with a pretended model."""

import asyncio
import contextlib
import gc
import random
import time
import weakref

import httpx
import pytest

from kvweave.config import FuzzyConfig, ServerConfig
from kvweave.engine.async_engine import AsyncEngine
from kvweave.plugins import BACKENDS
from kvweave.server.streaming import LiveGenerations
from support.enginekit import EOS, LetterTokenizer, OracleRunner, make_world, oracle_answer
from support.serverkit import RunningServer, eventually, toy_card, toy_tokenizer


def serve(backend, **settings):
    """A server, not yet started, over an engine whose every read of KV is checked."""
    world = make_world(backend, **settings)
    # What the engine writes is in the world's own letters; the server wants a whole tokenizer.
    tokenizer = world.engine.loaded.tokenizer = toy_tokenizer()
    return world, RunningServer(
        AsyncEngine(world.engine), ServerConfig(port=0), toy_card(tokenizer)
    )


def assert_idle(world, client):
    """No request owns a page; what is not free belongs to the cache, which can give it back."""

    def idle():
        now = client.get("/server_info").json()["engine"]
        return now["running"] == now["waiting"] == now["used_tokens"] == 0

    assert eventually(idle), client.get("/server_info").text
    assert world.runner.violations == []


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_200_clients_of_which_a_third_vanish(backend):
    """Whoever stays gets the model's own answer; nobody leaves a page behind."""
    choose = random.Random(3)
    documents = [[choose.randrange(EOS) for _ in range(48)] for _ in range(6)]
    world, server = serve(backend, pool_tokens=1024, chunked_prefill_size=128, page_size=4)
    letters = LetterTokenizer()

    async def one(client, fate):
        prompt = choose.choice(documents)[: choose.randrange(8, 48)]
        prompt = choose.choice(documents)[: choose.randrange(1, 24)] + prompt
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        if fate is not None:
            body |= {"stream": choose.random() < 0.5, "n": choose.randrange(1, 3)}
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(client.post("/v1/completions", json=body), fate)
            return
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        expected = letters.decode([token for token in oracle_answer(prompt, 12) if token != EOS])
        assert reply.json()["choices"][0]["text"] == expected

    async def all_of_them():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            fates = [choose.uniform(0, 1.5) if n % 3 == 0 else None for n in range(200)]
            await asyncio.gather(*(one(client, fate) for fate in fates))

    with server, server.client() as client:
        asyncio.run(all_of_them())
        assert_idle(world, client)
        assert client.post("/flush_cache").status_code == 200
    world.assert_idle()
    assert world.engine.snapshot().free_tokens == 1024


def test_a_prompt_served_from_moved_text_hits_exactly_once_the_server_was_idle():
    fuzzy = FuzzyConfig(heal=True, time_budget_ms=10_000.0)
    world, server = serve("fuzzy_match", fuzzy=fuzzy)
    document, header = list(range(60)), list(range(80, 90))
    with server, server.client() as client:

        def ask(prompt):
            body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
            reply = client.post("/v1/completions", json=body).json()
            return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]

        ask([*document, 1, 2, 3])
        text, details = ask(header + document + [4] * 9)
        assert details["moved_tokens"] > 40
        metric = 'kvweave:healed_prompts_total{model_name="toy"} 1.0'
        assert eventually(lambda: metric in client.get("/metrics").text)
        again, details = ask(header + document + [4] * 9)
        assert (details["cached_tokens"], details["moved_tokens"]) == (76, 0)
        assert again == text
        assert_idle(world, client)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_leaving_in_every_phase(phase, stream, monkeypatch):
    world, server = serve(
        "radix", max_running_requests=2, chunked_prefill_size=16, page_size=4, pool_tokens=2048
    )
    gate = Gate(monkeypatch)
    body = {"temperature": 0, "ignore_eos": True, "stream": stream}
    long = {**body, "prompt": list(range(90)) * 5, "max_tokens": 500}
    short = {**body, "prompt": [1, 2, 3], "max_tokens": 500}

    async def leave():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            blockers = 2 if phase == "queue" else 0
            bodies = [short | {"cache_salt": str(n)} for n in range(blockers)]
            bodies.append(long if phase == "prefill" else short)
            tasks = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies
            ]
            await asyncio.to_thread(eventually, lambda: reached(world, phase))
            assert reached(world, phase), world.engine.snapshot()
            for task in reversed(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    with server, server.client() as client:
        asyncio.run(leave())
        gate.open()
        assert_idle(world, client)
        reply = client.post("/v1/completions", json={**short, "max_tokens": 2, "stream": False})
        assert reply.status_code == 200
        assert client.get("/server_info").json()["engine"]["aborted"] >= 1
    world.assert_idle()


class Gate:
    """Slows every forward pass down, until opened, so that phases can be met."""

    def __init__(self, monkeypatch):
        self.seconds = 0.01
        forward = OracleRunner.forward

        def slow(runner, batch):
            time.sleep(self.seconds)
            return forward(runner, batch)

        monkeypatch.setattr(OracleRunner, "forward", slow)

    def open(self):
        self.seconds = 0.0


def reached(world, phase):
    now = world.engine.snapshot()
    if phase == "queue":
        return now.running == 2 and now.waiting == 1
    if phase == "prefill":
        return now.running == 1 and 0 < now.prefill_tokens < 300
    return now.running == 1 and now.generated_tokens > 3


def test_a_worker_that_fails_costs_its_requests_only(monkeypatch):
    world, server = serve("radix", page_size=4)

    def break_down(batch):
        if 77 in batch.token_ids:
            raise RuntimeError("the card is on fire")

    world.runner.before = break_down
    with server, server.client() as client:
        reply = client.post("/v1/completions", json={"prompt": [77], "max_tokens": 2})
        assert reply.status_code == 500
        assert "on fire" in reply.json()["error"]["message"]
        body = {"prompt": [5, 6], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.get("/health").status_code == 200
        assert_idle(world, client)
    world.assert_idle()


def test_an_engine_that_gives_up_is_unhealthy_and_says_so():
    world, server = serve("radix")

    def break_down(batch):
        raise RuntimeError("the card is gone")

    world.runner.before = break_down
    with server, server.client() as client:
        for _ in range(6):
            client.post("/v1/completions", json={"prompt": [1], "max_tokens": 2})
        assert client.get("/health").status_code == 503
        reply = client.post("/v1/completions", json={"prompt": [1], "max_tokens": 2})
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "engine_dead"


def test_limits_of_the_engine_reach_clients_in_words():
    world, server = serve("radix", pool_tokens=64, page_size=4, max_queued_requests=1)
    with server, server.client() as client:
        for body, words in (
            ({"prompt": [1] * 100}, "--max-total-tokens"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [1], "stop_token_ids": [10**6]}, "stop_token_ids"),
            ({"prompt": [1], "logit_bias": {"96": 1}}, "logit_bias"),
        ):
            reply = client.post("/v1/completions", json=body)
            assert reply.status_code == 400
            assert words in reply.json()["error"]["message"]
        reply = client.post("/v1/completions", json={"prompt": [[1], [2], [3], [4]]})
        assert reply.status_code == 429
        assert reply.headers["retry-after"] == "1"
        assert_idle(world, client)
    world.assert_idle()


@pytest.mark.parametrize("failing", [False, True])
def test_a_finished_request_leaves_neither_its_rid_taken_nor_garbage(monkeypatch, failing):
    world, server = serve("radix")
    # Every second forward pass fails: in a stream, that is after its first token was sent.
    steps = world.runner.batches
    world.runner.before = lambda batch: 1 / 0 if failing and len(steps) % 2 == 0 else None
    seen = []
    enter = LiveGenerations.enter

    def watched(live, rid, generation):
        seen.append(weakref.ref(generation))
        enter(live, rid, generation)

    monkeypatch.setattr(LiveGenerations, "enter", watched)
    gc.disable()  # what only the collector would find counts as garbage
    try:
        with server, server.client() as client:
            for stream in (False, True, False):
                body = {"prompt": [1], "max_tokens": 2, "rid": "same", "stream": stream}
                reply = client.post("/v1/completions", json=body)
                assert reply.status_code == (500 if failing and not stream else 200), reply.text
                assert ("ZeroDivisionError" in reply.text) == failing
            assert eventually(lambda: [ref() for ref in seen] == [None] * 3, seconds=5)
    finally:
        gc.enable()


def test_text_that_moved_is_reported_span_by_span():
    world, server = serve("fuzzy_match", page_size=4)
    document = [(7 * n * n + 3 * n) % EOS for n in range(120)]
    with server, server.client() as client:

        def ask(opening, **more):
            body = {"prompt": opening + document + [1, 2, 3, 4, 5, 6, 7, 8, 9], "max_tokens": 2}
            reply = client.post("/v1/completions", json={**body, "return_plan": True, **more})
            answer = reply.json()
            return answer["usage"]["prompt_tokens_details"], answer["kvweave_plan"]

        assert ask([10, 11, 12, 13, 14]) == (
            {
                "cached_tokens": 0,
                "moved_tokens": 0,
                "paraphrase_tokens": 0,
                "refreshed_tokens": 0,
                "session_tokens": 0,
                "shared_tokens": 0,
                "cache_write_tokens": 132,  # whole pages
            },
            [],
        )
        details, plan = ask([20, 21, 22])
        served = details["moved_tokens"] + details["refreshed_tokens"]
        assert served == sum(span["length"] for span in plan) > 100
        assert details["refreshed_tokens"] == 16, "the first tokens of the span"
        assert {span["tier"] for span in plan} == {"moved"}
        assert plan[0]["start"] - plan[0]["donor_start"] == 3 - 5
        for exact in ({"fuzzy": False}, {"cache_salt": "other"}):
            details, plan = ask([30, 31], **exact)
            assert details["moved_tokens"] == 0
            assert plan == []
        document += [(11 * n * n + n) % EOS for n in range(80)]  # new, and computed behind moved KV
        for opening, lent in (([40, 41], False), ([50, 51, 52, 53], True)):
            details, plan = ask(opening, prompt_cache_key="s")
            approximate = sum(span["length"] for span in plan if span["generation"] == 1)
            assert (details["session_tokens"] > 40) == (approximate > 40) == lent
            assert details["session_tokens"] <= min(approximate, details["moved_tokens"])
    world.assert_idle()
