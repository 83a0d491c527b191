"""`kvweave serve` as a process of its own: ready line, signals, exit."""

import re
import signal
import subprocess
import sys
import threading

import httpx
import pytest


@pytest.fixture
def process(tiny_folder):
    folder = str(tiny_folder("llama"))
    command = [sys.executable, "-m", "kvweave.cli.main", "serve", "--model", folder, "--port", "0"]
    flags = ["--max-total-tokens", "1024", "--served-model-name", "tiny", "--log-requests"]
    process = subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def url_when_ready(process):
    ready = process.stdout.readline()
    found = re.fullmatch(
        r"kvweave serves tiny at (http://127.0.0.1:\d+)/v1 "
        r"\(hash cache, room for 1,024 tokens\)\n",
        ready,
    )
    assert found, ready + process.stderr.read()
    return found[1]


def test_it_says_when_it_is_ready_and_finishes_what_runs_when_told_to_stop(process):
    url = url_when_ready(process)
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "rid": "last"}
    replies = []
    asking = threading.Thread(
        target=lambda: replies.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))
    )
    asking.start()
    while httpx.get(f"{url}/server_info").json()["engine"]["running"] == 0:
        pass
    process.send_signal(signal.SIGTERM)
    asking.join(60)
    assert replies[0].json()["choices"][0]["finish_reason"] == "length"
    assert process.wait(30) in (0, -signal.SIGTERM)
    log = process.stderr.read()
    assert "rid=last endpoint=completions outcome=length" in log
    assert "Traceback" not in log


def test_interrupting_it_is_quiet(process):
    url_when_ready(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) in (0, 130)
    assert "Traceback" not in process.stderr.read()
