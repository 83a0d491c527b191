"""The script that measures a running SGLang, against a stand-in that answers as SGLang does."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvweave_bench import in_sglang


class _StandIn(BaseHTTPRequestHandler):
    """Lends all known texts but 32 tokens each; a word is a token."""

    known: set[str] = set()
    runs = 0

    def do_GET(self) -> None:
        state = {"kvweave": {"lent_runs": _StandIn.runs}}
        self._reply({"model_path": "some-model", "version": "1", "internal_states": [state]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        exact = asked["sampling_params"].get("custom_params") == {"kvweave_fuzzy": False}
        assert exact == ("cache_salt" in asked)
        lent = 0
        for line in asked["text"].splitlines():
            if not exact and line.startswith("Room") and line in _StandIn.known:
                _StandIn.runs += 1
                lent += len(line.split()) - 32
            if not exact:
                _StandIn.known.add(line)
        likely = [[math.log(0.6), 5, None], [math.log(0.3), 7, None]]
        about: dict[str, Any] = {
            "prompt_tokens": len(asked["text"].split()),
            "cached_tokens": lent,
            "cached_tokens_details": {"host": lent} if lent else None,
        }
        if "top_logprobs_num" in asked:
            about["output_top_logprobs"] = [likely]
        if "token_ids_logprob" in asked:
            assert asked["token_ids_logprob"] == [5, 7]
            about["output_token_ids_logprobs"] = [likely[::-1]]
        self._reply({"text": " yes", "meta_info": about})

    def _reply(self, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_what_a_server_lends_is_in_the_report(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--url", url, "--sizes", "1024", "--n", "3", "--pairs", "2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["in_sglang", *arguments])
    in_sglang.main()
    report = json.loads(file.read_text())
    found = {(row["metric"], row["arm"]): row for row in report["rows"]}
    assert found["served", "1024"]["value"] == 1
    assert 0.9 < found["document_share", "1024"]["value"] < 1
    assert found["kl_mean", "1024"]["value"] == pytest.approx(0, abs=1e-9)
    assert found["first_token_speedup", "1024"]["n"] == 2
    for donors in (1, 3):
        assert found["passages_lent", f"{donors} donors"]["value"] == 1
    assert report["machine"]["plugin"]["lent_runs"] == _StandIn.runs


def test_merging_unlikely_tokens_never_raises_the_divergence() -> None:
    cold = {at: math.log(p) for at, p in enumerate((0.5, 0.3, 0.15, 0.05))}
    warm = {at: math.log(p) for at, p in enumerate((0.4, 0.3, 0.2, 0.1))}
    whole = sum(math.exp(cold[at]) * (cold[at] - warm[at]) for at in cold)
    assert 0 < in_sglang.divergence({at: cold[at] for at in (0, 1)}, warm) < whole
    assert in_sglang.divergence(cold, warm) == pytest.approx(whole, abs=1e-6)
