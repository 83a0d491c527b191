"""What /metrics and the log say about requests that were refused, failed or aborted."""

import json
import logging
import re
import threading
from contextlib import contextmanager

import pytest

from kvweave.config import ServerConfig
from kvweave.engine.async_engine import AsyncEngine
from kvweave.engine.types import Usage
from kvweave.errors import EngineDeadError, KvweaveError, OverloadedError, RequestError
from kvweave.prefix.lease import Reuse
from support.enginekit import make_world
from support.serverkit import RunningServer, eventually, toy_card, toy_tokenizer

ASK = {"prompt": "hello", "max_tokens": 6}


def value(client, name, **labels):
    """The sum of all samples of `name` with these labels."""
    total = 0.0
    for line in client.get("/metrics").text.splitlines():
        found = re.fullmatch(r"kvweave:(\w+)\{(.*)\} (\S+)", line)
        if found and found[1] == name and all(f'{k}="{v}"' in found[2] for k, v in labels.items()):
            total += float(found[3])
    return total


@contextmanager
def counted(client, **expected):
    """Within the block each counter grows by the figure given, and no other of these grows."""
    names = {"num_requests", "num_failed_requests", "num_aborted_requests", "num_refused_requests"}
    names = {f"{name}_total" for name in names} | set(expected)
    before = {name: value(client, name) for name in names}
    yield
    wanted = {name: expected.get(name, 0) for name in names}
    found = {}

    def fits():
        found.update({name: value(client, name) - before[name] for name in names})
        return found == wanted

    assert eventually(fits, 5), f"{found} for {wanted}"


@pytest.fixture
def logged(server, caplog):
    server.app.state.service.config = ServerConfig(log_requests=True)
    caplog.set_level(logging.INFO, "kvweave.server.requests")
    yield lambda: [r for r in caplog.records if r.name.endswith("requests")][-1].getMessage()
    server.app.state.service.config = server.config


REFUSALS = [
    ({"json": ASK}, OverloadedError("the queue is full", retry_after=3), 429),
    ({"json": ASK}, RequestError("no 'such'\nthing", status=400), 400),
    ({"json": ASK | {"prompt": "x" * 3000}}, None, 400),
]


@pytest.mark.parametrize(("asked", "failure", "status"), REFUSALS)
def test_what_the_engine_refuses_is_refused_and_not_failed(
    client, engine, logged, asked, failure, status
):
    if failure is not None:
        engine.failure["submit"] = failure
    refused = value(client, "num_refused_requests_total", status=status)
    with counted(client, num_refused_requests_total=1):
        reply = client.post("/v1/completions", **asked)
        assert reply.status_code == status
    assert value(client, "num_refused_requests_total", status=status) == refused + 1
    line = logged()
    assert "outcome=refused" in line
    why = json.loads(line.partition("reason=")[2])
    assert why == reply.json()["error"]["message"].splitlines()[0] or "such" in why


def test_what_never_reaches_the_engine_is_refused_too(client):
    for path, body, status in (
        ("/v1/completions", {"prompt": 1.5}, 400),
        ("/v1/completions", ASK | {"model": "another"}, 404),
        ("/v1/chat/completions", {"messages": "x"}, 400),
        ("/tokenize", {}, 400),
    ):
        with counted(client, num_refused_requests_total=1):
            assert client.post(path, json=body).status_code == status
    with counted(client, num_refused_requests_total=1):
        assert client.get("/nowhere").status_code == 404
    with counted(client, num_refused_requests_total=1):
        headers = {"sec-fetch-site": "cross-site"}
        assert client.get("/v1/models", headers=headers).status_code == 403


@pytest.mark.parametrize("failure", [KvweaveError("step broke"), RuntimeError("a bug"), None])
def test_what_fails_is_failed_and_the_log_says_why(client, engine, logged, failure):
    engine.failure = {"prefill": failure} if failure else {}
    engine.error_after = None if failure else 2
    with counted(client, num_requests_total=1, num_failed_requests_total=1):
        assert client.post("/v1/completions", json=ASK).status_code == 500
    line = logged()
    assert "outcome=error" in line
    assert json.loads(line.partition("reason=")[2]) == str(failure or "step broke")


def test_an_engine_that_stopped_fails_requests(client, engine):
    engine.failure["submit"] = EngineDeadError("the engine has stopped")
    with counted(client, num_requests_total=1, num_failed_requests_total=1):
        assert client.post("/v1/completions", json=ASK).status_code == 503


def test_an_answer_that_ended_well_has_no_reason_in_the_log(client, logged):
    client.post("/v1/completions", json=ASK)
    assert "reason" not in logged()


def abort_in(client, engine, phase):
    engine.hold = phase
    body = ASK | {"rid": phase, "max_tokens": 40}
    asking = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": body})
    asking.start()
    assert eventually(lambda: engine.phases.get(phase) == phase)
    assert client.post("/abort_request", json={"rid": phase}).json()["aborted"] == 1
    asking.join(20)
    engine.hold = None


TOKENS = ("prompt_tokens", "generation_tokens")


def assert_sums_are_totals(client):
    for name in TOKENS:
        total = value(client, f"{name}_total")
        assert value(client, f"{name}_histogram_sum") == total > 0, name
    counts = {name: value(client, f"{name}_histogram_count") for name in TOKENS}
    assert counts["prompt_tokens"] == counts["generation_tokens"]


def test_histograms_add_up_to_their_counters_however_requests_end(client, engine):
    engine.usage = Usage(reuse=Reuse(exact=2, moved=2, shared=1))
    served = {"num_requests_total": 1, "prompt_tokens_total": 5, "shared_tokens_total": 1}
    with counted(client, **served, generation_tokens_total=6):
        client.post("/v1/completions", json=ASK)
    aborted = {"num_requests_total": 1, "num_aborted_requests_total": 1}
    for phase in ("queue", "prefill"):  # no token came: nothing was served
        with counted(client, **aborted, prompt_tokens_total=0, generation_tokens_total=0):
            abort_in(client, engine, phase)
    with counted(client, **aborted, prompt_tokens_total=5, generation_tokens_total=1):
        abort_in(client, engine, "decode")
    engine.hold = "decode"
    with counted(client, **aborted, prompt_tokens_total=5, generation_tokens_total=2):
        body = ASK | {"stream": True, "n": 2}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            next(reply.iter_bytes())
    engine.hold = None
    engine.error_after = 3
    failed = {"num_requests_total": 1, "num_failed_requests_total": 1}
    with counted(client, **failed, prompt_tokens_total=5, generation_tokens_total=3):
        client.post("/v1/completions", json=ASK)
    engine.error_after = None
    scored = ASK | {"max_tokens": 0, "echo": True, "logprobs": 1}
    with counted(client, num_requests_total=1, prompt_tokens_total=5, generation_tokens_total=0):
        client.post("/v1/completions", json=scored)
    assert_sums_are_totals(client)
    cached = value(client, "cached_tokens_total")
    assert value(client, "cache_hit_rate") == cached / value(client, "prompt_tokens_total")


def test_probes_of_health_are_no_prompts(client):
    with counted(client, prompt_tokens_total=0, generation_tokens_total=0):
        assert client.get("/health_generate").status_code == 200


class SteppedEngine:
    """An engine whose forward passes wait for permission, one each."""

    def __init__(self):
        self.world = make_world("radix")
        self.world.engine.loaded.tokenizer = toy_tokenizer()
        self.permits = threading.Semaphore(0)
        self.waiting = threading.Event()
        self.free = False
        self.world.runner.before = self._before

    def _before(self, batch):
        if not self.free:
            self.waiting.set()
            assert self.permits.acquire(timeout=30)

    def step(self):
        """Let the pass that waits go on, and wait until the next one does."""
        self.waiting.clear()
        self.permits.release()
        assert self.waiting.wait(20)


def test_gauges_know_what_clients_know_while_a_step_takes_long():
    stepped = SteppedEngine()
    engine = AsyncEngine(stepped.world.engine)
    card = toy_card(stepped.world.engine.loaded.tokenizer)
    with RunningServer(engine, ServerConfig(port=0), card) as server, server.client() as client:
        ended = []

        def ask(rid):
            body = {"prompt": [1, 2, 3], "rid": rid, "max_tokens": 50, "ignore_eos": True}
            ended.append(client.post("/v1/completions", json=body).json())

        threads = [threading.Thread(target=ask, args=(rid,)) for rid in "ab"]
        threads[0].start()
        assert stepped.waiting.wait(20)
        threads[1].start()
        assert eventually(lambda: len(server.app.state.service.live) == 2)
        stepped.step()
        assert value(client, "num_running_reqs") + value(client, "num_queue_reqs") == 2
        stepped.step()
        assert client.post("/abort_request", json={"rid": "b"}).json()["aborted"] == 1
        stepped.step()
        threads[1].join(20)
        [answer] = ended
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert value(client, "num_running_reqs") == 1
        stepped.free = True
        stepped.permits.release()
        threads[0].join(20)
    stepped.world.assert_idle()


def test_health_may_be_asked_without_a_body(client, engine):
    reply = client.head("/health")
    assert (reply.status_code, reply.content) == (200, b"")
    engine.alive = False
    assert client.head("/health").status_code == 503
