"""Binding an address, draining on shutdown, and aborting what outlasts the drain."""

import asyncio
import json
import signal
import threading
import time

import pytest

from kvweave.config import ServerConfig
from kvweave.errors import ConfigError, EngineDeadError
from kvweave.server import app as server_app
from kvweave.server.app import bind, serve, url_of
from support.serverkit import FakeEngine, RunningServer, eventually, toy_card


def test_an_address_that_is_taken_is_refused_in_words():
    first = bind(ServerConfig(port=0))
    first.listen()
    port = first.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"port {port} \(Address already in use\); --host and"):
        bind(ServerConfig(port=port))
    first.close()
    with pytest.raises(ConfigError, match="cannot listen on no such host"):
        bind(ServerConfig(host="no such host"))


def test_the_url_names_the_port_that_was_given():
    with bind(ServerConfig(port=0)) as listening:
        assert url_of(listening) == f"http://127.0.0.1:{listening.getsockname()[1]}"


def stream_in_thread(server, lines, **body):
    def read():
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json={"stream": True, **body}) as reply,
        ):
            lines.extend(line for line in reply.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_running_answers_are_finished_and_new_clients_turned_away():
    engine = FakeEngine()
    engine.step_seconds = 0.02
    lines = []
    with RunningServer(engine, ServerConfig(port=0, drain_seconds=20)) as server:
        reading = stream_in_thread(server, lines, prompt="x", max_tokens=20)
        assert eventually(lambda: "decode" in engine.phases.values())
        server.server.should_exit = True
        assert eventually(lambda: not server.server.servers[0].is_serving())
    reading.join(10)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert not engine.alive, "the engine is stopped with the server"


def test_what_outlasts_the_drain_is_ended_properly():
    engine = FakeEngine()
    engine.step_seconds = 0.02
    lines = []
    with RunningServer(engine, ServerConfig(port=0, drain_seconds=0.2)) as server:
        reading = stream_in_thread(server, lines, prompt="x", max_tokens=2000)
        assert eventually(lambda: "decode" in engine.phases.values())
        asked = time.monotonic()
        server.server.should_exit = True
    assert time.monotonic() - asked < 20, "an answer of 40 seconds was waited for"
    reading.join(10)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_told_to_stop_in_every_phase_it_ends_answers_properly(phase, stream):
    engine = FakeEngine()
    engine.hold = phase
    replies = []
    body = {"prompt": "x", "max_tokens": 20, "stream": stream}

    def ask():
        with server.client() as client:
            replies.append(client.post("/v1/completions", json=body))

    with RunningServer(engine, ServerConfig(port=0, drain_seconds=0.1)) as server:
        asking = threading.Thread(target=ask)
        asking.start()
        assert eventually(lambda: phase in engine.phases.values())
    asking.join(10)
    assert replies[0].status_code == 200
    assert '"finish_reason":"abort"' in replies[0].text
    assert stream == replies[0].text.endswith("data: [DONE]\n\n")
    assert not engine.pages


def test_a_second_signal_ends_the_drain_properly_and_a_third_does_not_wait():
    engine = FakeEngine()
    engine.step_seconds = 0.02
    lines = []
    with RunningServer(engine, ServerConfig(port=0, drain_seconds=600)) as server:
        reading = stream_in_thread(server, lines, prompt="x", max_tokens=2000)
        assert eventually(lambda: "decode" in engine.phases.values())
        server.server.handle_exit(signal.SIGTERM, None)
        assert eventually(lambda: not server.server.servers[0].is_serving())
        time.sleep(0.2)
        assert "decode" in engine.phases.values(), "one signal waits for the answer"
        server.server.handle_exit(signal.SIGTERM, None)
        reading.join(20)
        assert not server.server.force_exit
        server.server.handle_exit(signal.SIGTERM, None)
        assert server.server.force_exit
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "abort"


def test_an_engine_that_hangs_does_not_keep_the_server(monkeypatch, caplog):
    class Hanging(FakeEngine):
        async def stop(self, drain_seconds=0.0):
            await asyncio.Event().wait()

    monkeypatch.setattr(server_app, "_STOP_SECONDS", 0.05)
    with RunningServer(Hanging(), ServerConfig(port=0)):
        pass
    assert "the engine did not stop within 0.05 seconds" in caplog.text


def test_without_its_engine_the_server_leaves_so_that_another_can_be_started():
    engine, config = FakeEngine(), ServerConfig(port=0)
    app = server_app.build_api(engine, toy_card(engine.tokenizer), config)
    ready, end = threading.Event(), []

    def run():
        try:
            listening = bind(config)
            serve(app, config, listening, on_ready=lambda url: ready.set(), leave_with_engine=True)
        except EngineDeadError as error:
            end.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(20)
    engine.alive = False
    thread.join(20)
    assert end == ["the engine has stopped for good, and so has the server"]
