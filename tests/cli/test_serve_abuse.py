"""`kvweave serve` with an unread log, full disks, and a kill in the middle of its work."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from kvweave.config import ServerConfig
from kvweave.server.app import bind
from support.serverkit import eventually

LONG = {"prompt": "x", "max_tokens": 255, "ignore_eos": True, "stream": True}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def start(tiny_folder, tmp_path):
    """Start a server; return it and a client as soon as it answers."""
    started = []

    def start(**streams):
        port = free_port()
        flags = [
            *("--model", str(tiny_folder("llama")), "--port", str(port), "--log-level", "debug"),
            *("--max-total-tokens", "1024", "--chunked-prefill-size", "16", "--log-requests"),
        ]
        environment = os.environ | {"KVWEAVE_CACHE": str(tmp_path)}
        command = [sys.executable, "-m", "kvweave.cli.main", "serve", *flags]
        process = subprocess.Popen(command, env=environment, **streams)
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        started.extend((client, process))

        def answers():
            assert process.poll() is None, "it has ended"
            with contextlib.suppress(httpx.TransportError):
                return client.get("/health").status_code == 200

        assert eventually(answers, 60)
        return process, client

    yield start
    for one in started:
        if isinstance(one, httpx.Client):
            one.close()
        else:
            one.kill()
            one.communicate()


def test_full_disks_do_not_stop_serving_or_a_clean_end(start):
    with open("/dev/full", "w") as full:
        process, client = start(stdout=full, stderr=full)
    reply = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert reply.status_code == 200
    assert client.post("/v1/completions", json={"prompt": ""}).status_code == 400
    lines = []

    def read():
        with client.stream("POST", "/v1/completions", json=LONG) as streamed:
            lines.extend(line for line in streamed.iter_lines() if line)

    reading = threading.Thread(target=read)
    reading.start()
    assert eventually(lambda: lines)
    process.send_signal(signal.SIGTERM)
    reading.join(60)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert process.wait(60) == 0


def test_an_unread_log_blocks_nothing_and_a_kill_leaves_no_process(start, tmp_path):
    process, client = start(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for n in range(40):  # of which each is logged, and a pipe holds sixteen
        assert client.get("/health", params={"n": n, "x": "x" * 4000}).status_code == 200
    before = sorted(tmp_path.rglob("*"))
    with client.stream("POST", "/v1/completions", json=LONG) as streamed:
        events = streamed.iter_lines()
        assert next(events).startswith("data: {")
        process.send_signal(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(events)
    assert process.wait(30) == -signal.SIGKILL
    bind(ServerConfig(port=client.base_url.port)).close()  # at once
    assert sorted(tmp_path.rglob("*")) == before
