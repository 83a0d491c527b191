"""`kvweave serve` as a process of its own: ready line, signals, exit."""

import json
import re
import signal
import subprocess
import sys
import threading

import httpx
import pytest


@pytest.fixture
def process(tiny_folder, tmp_path):
    settings = tmp_path / "kvweave.yaml"
    settings.write_text(
        f"model: {tiny_folder('llama')}\nserved-model-name: tiny\nport: 8000\n"
        "max-total-tokens: 240\nlog-requests: true\nlog-format: json\nlog-level: debug\n"
    )
    command = [sys.executable, "-m", "kvweave.cli.main", "serve", "--config", str(settings)]
    process = subprocess.Popen(
        [*command, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def url_when_ready(process):
    ready = process.stdout.readline()
    found = re.fullmatch(
        r"kvweave serves tiny at (http://127.0.0.1:\d+)/v1 "
        r"\(hash cache, room for 240 tokens\)\n",
        ready,
    )
    assert found, ready + process.stderr.read()
    return found[1]


def test_it_reports_readiness_and_finishes_running_requests_on_sigterm(process):
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
    assert process.wait(30) == 0
    log = [json.loads(line) for line in process.stderr]
    assert not any("exception" in line for line in log)
    warned = [line["message"] for line in log if line["level"] == "warning"]
    assert [each for each in warned if "KV pool is smaller than the model's context" in each]
    of_it = {line["logger"]: line for line in log if line.get("rid") == "last"}
    assert of_it["kvweave.server.requests"]["outcome"] == "length"
    assert '"POST /v1/completions HTTP/1.1" 200' in of_it["uvicorn.access"]["message"]


def test_sigterm_while_loading_ends_the_process(process):
    assert process.stderr.readline()  # something is logged long before it is ready
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log


def test_interrupting_the_process_is_quiet(process):
    url_when_ready(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) in (0, 130)
    assert "Traceback" not in process.stderr.read()
