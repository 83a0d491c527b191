"""SGLang's router in front of two servers, unchanged: `make test-router` installs and runs it."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from kvweave.config import CacheConfig, EngineConfig, ServerConfig
from kvweave.engine.async_engine import AsyncEngine
from kvweave.engine.engine import Engine
from kvweave.server.model_card import card_of
from support.serverkit import RunningServer, eventually

pytestmark = [
    pytest.mark.router,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang_router") is None,
        reason="sglang-router is not installed; `make test-router` does both",
    ),
]
GROUPS, TURNS = 6, 5


@pytest.fixture(scope="module")
def workers(tiny) -> Iterator[list[RunningServer]]:
    loaded = tiny("llama")
    config = EngineConfig(cache=CacheConfig(prefix_cache_backend="radix", max_total_tokens=4096))
    running = [
        RunningServer(AsyncEngine(Engine(config, loaded)), ServerConfig(port=0), card_of(loaded))
        for _ in range(2)
    ]
    for worker in running:
        worker.__enter__()
    yield running
    for worker in running:
        worker.__exit__()


@pytest.fixture(scope="module")
def router(workers) -> Iterator[httpx.Client]:
    with run_router(workers, "cache_aware") as client:
        yield client


class run_router:  # noqa: N801  # reads as the context that it is
    """A router before `workers`, and a client of it once it knows all of them."""

    def __init__(self, workers: list[RunningServer], policy: str) -> None:
        port, metrics = free_port(), free_port()
        self._workers = len(workers)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sglang_router.launch_router", "--policy", policy),
                *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)),
                *("--worker-urls", *(worker.url for worker in workers)),
                *("--worker-startup-check-interval", "1"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)

    def __enter__(self) -> httpx.Client:
        assert eventually(self._ready, 60), "the router did not accept the workers"
        return self.client

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()

    def _ready(self) -> bool:
        time.sleep(0.1)
        try:
            return self.client.get("/readiness").json().get("healthy_workers") == self._workers
        except (httpx.HTTPError, ValueError):
            return False


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def served(workers: list[RunningServer]) -> list[int]:
    return [worker.engine.snapshot().requests for worker in workers]


def ask(client: httpx.Client, prompt: str, **more) -> httpx.Response:
    body = {"model": "llama", "prompt": prompt, "max_tokens": 3, "temperature": 0, **more}
    return client.post("/v1/completions", json=body)


def test_workers_are_known_by_what_they_say_of_themselves(router, workers):
    said = router.get("/workers").json()["workers"]
    assert {worker["url"] for worker in said} == {worker.url for worker in workers}
    assert {worker["model_id"] for worker in said} == {workers[0].card.name}
    assert all(worker["is_healthy"] for worker in said)
    assert [each["load"] for each in router.get("/get_loads").json()["workers"]] == [0, 0]
    assert router.get("/v1/models").json()["data"][0]["id"] == workers[0].card.name
    assert router.get("/get_model_info").json()["model_path"] == workers[0].card.path


def test_turns_stay_with_their_group(router, workers):
    for group in range(GROUPS):
        text, before = f"{group} {chr(97 + group) * 60}", served(workers)
        for turn in range(TURNS):
            reply = ask(router, text := f"{text} turn {turn}")
            assert reply.status_code == 200, reply.text
            details = reply.json()["usage"]["prompt_tokens_details"]
            assert turn == 0 or details["cached_tokens"] >= 48
        assert sorted(np.subtract(served(workers), before)) == [0, TURNS]


def test_both_serve_when_many_ask(router, workers):
    before = served(workers)
    with ThreadPoolExecutor(12) as clients:
        prompts = [f"{at} {chr(65 + at) * 60}" for at in range(24)]
        replies = clients.map(lambda text: ask(router, text, max_tokens=60), prompts)
        assert {reply.status_code for reply in replies} == {200}
    assert min(np.subtract(served(workers), before)) >= 6


def test_sglangs_own_interface_passes_through(router):
    body = {"text": "Rivers:", "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    reply = router.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    assert (
        reply.json()["text"] == ask(router, "Rivers:", max_tokens=12).json()["choices"][0]["text"]
    )


def test_streams_and_chats_pass_through(router, workers):
    plain = ask(router, "Rivers:", max_tokens=12).json()["choices"][0]["text"]
    with router.stream(
        "POST",
        "/v1/completions",
        json={"model": "llama", "prompt": "Rivers:", "max_tokens": 12, "temperature": 0}
        | {"stream": True, "stream_options": {"include_usage": True}},
    ) as stream:
        events = [line for line in stream.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 3
    pieces = [json.loads(event[6:]) for event in events[:-1]]
    assert "".join(each["choices"][0]["text"] for each in pieces if each["choices"]) == plain
    assert pieces[-1]["usage"]["completion_tokens"] == 12


def test_errors_keep_their_shape(router):
    reply = ask(router, "x", top_p=3.0)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "top_p"


def test_caches_are_flushed_through_the_router(router, workers):
    ask(router, "flush me " * 10)
    assert router.post("/flush_cache").json()["workers_flushed"] == 2
    assert [worker.engine.snapshot().cached_tokens for worker in workers] == [0, 0]


def test_the_policy_that_asks_for_load_gets_it(workers):
    with run_router(workers, "power_of_two") as client:
        assert [each["load"] for each in client.get("/get_loads").json()["workers"]] == [0, 0]
        before = served(workers)
        for at in range(12):
            assert ask(client, f"{at} asks").status_code == 200
        assert sum(served(workers)) == sum(before) + 12
