"""Routes for operators: health, facts, metrics, tokenizing, flushing, aborting; and the log."""

import json
import logging
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace

import pytest
import transformers
from starlette.testclient import TestClient

import kvweave
from kvweave.config import ClusterConfig, EngineConfig, ModelConfig, ServerConfig
from kvweave.config.base import settings_of
from kvweave.engine.selfcheck.gate import SelfCheck
from kvweave.engine.selfcheck.measure import Measured
from kvweave.engine.types import Usage
from kvweave.errors import EngineDeadError
from kvweave.explorer.routes import build_app
from kvweave.prefix.lease import Reuse
from kvweave.server.logs import JsonFormatter
from support.serverkit import FakeEngine, RunningServer, eventually, toy_card

ANYTHING = {"json": {"prompt": "x", "max_tokens": 2}}


def test_health_follows_the_engine(client, engine):
    assert client.get("/health").json() == {"status": "ok"}
    engine.alive = False
    for path in ("/health", "/health_generate"):
        reply = client.get(path)
        assert reply.status_code == 503
        assert "stopped" in reply.json()["error"]["message"]


def test_health_can_go_through_the_engine(client, engine):
    assert client.get("/health_generate").status_code == 200
    [request] = engine.requests
    assert request.sampling.max_tokens == 1
    assert request.cache_salt is not None
    engine.failure["prefill"] = EngineDeadError("the engine has stopped")
    assert client.get("/health_generate").status_code == 503


def test_a_probe_that_gets_no_token_gives_up(client, engine, monkeypatch):
    monkeypatch.setattr("kvweave.server.routes.admin._PROBE_SECONDS", 0.05)
    engine.hold = "queue"
    assert "no token" in client.get("/health_generate").json()["error"]["message"]
    assert eventually(lambda: not engine.phases)


def test_the_model_is_listed(client):
    [model] = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("toy", "model", 2048)
    assert client.get("/v1/models/toy").json() == model
    assert client.get("/v1/models/", follow_redirects=False).json()["data"] == [model]


def test_a_model_answers_to_each_of_its_names():
    engine = FakeEngine()
    card = replace(toy_card(engine.tokenizer), aliases=("gpt-4o", "org/toy"))
    with RunningServer(engine, ServerConfig(port=0), card) as server, server.client() as client:
        listed = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["toy", "gpt-4o", "org/toy"]
        assert client.get("/v1/models/org/toy").json() == listed[2]
        for name in ("toy", "gpt-4o", "org/toy"):
            reply = client.post("/v1/completions", json={"prompt": "x", "model": name})
            assert reply.json()["model"] == "toy"
        assert client.post("/v1/completions", json={"prompt": "x", "model": "o"}).status_code == 404
    assert ModelConfig(served_model_name=" a, org/b,,a").served_names == ("a", "org/b")
    assert ModelConfig().served_names == ()


def test_what_routers_ask_is_answered_as_sglang_answers(client, engine):
    """Found by running sglang-router 0.3.2; tests/server/test_sglang_router.py runs it again."""
    model, server = client.get("/model_info").json(), client.get("/server_info").json()
    for facts in (model, server):
        for name in ("model_path", "served_model_name", "model_type"):
            assert isinstance(facts[name], str | None), name
    assert isinstance(model["is_generation"], bool)
    assert (server["dp_size"], server["kv_events"]) == (1, None)
    [load] = client.get("/get_load").json()
    assert load == {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    engine.hold = "queue"
    asking = threading.Thread(target=client.post, args=("/v1/completions",), kwargs=ANYTHING)
    asking.start()
    assert eventually(lambda: client.get("/get_load").json()[0]["num_waiting_reqs"] == 1)
    engine.hold = None
    asking.join(20)
    assert client.post("/flush_cache").status_code == 200


def test_facts_for_routers(client):
    for path in ("/get_model_info", "/model_info"):
        facts = client.get(path).json()
        assert facts["model_path"] == "/models/toy"
        assert facts["is_generation"] is True
    for path in ("/get_server_info", "/server_info"):
        info = client.get(path).json()
        assert info["version"] == kvweave.__version__
        assert info["prefix_cache_backend"] == "hash"
        assert info["engine"]["total_tokens"] == info["max_total_tokens"] == 1600
        assert (info["served_model_name"], info["model_path"]) == ("toy", "/models/toy")
        assert info["model"] is None, "SGLang's router wants a text here, or nothing"
        assert info["api_key"] is False
        assert info["fuzzy_self_check_result"] is None
        assert info["versions"]["transformers"] == transformers.__version__
        assert 0 < info["started"] <= time.time()


def test_every_flag_is_told_in_force_and_the_key_never(engine):
    config = ServerConfig(api_key="open sesame", log_format="json")
    cluster = ClusterConfig(replicas=3)
    app = build_app(engine, toy_card(engine.tokenizer), config, cluster=cluster)
    asked = TestClient(app).get("/server_info", headers={"Authorization": "Bearer open sesame"})
    info = asked.json()
    groups = (
        *(getattr(EngineConfig(), group.name) for group in fields(EngineConfig)),
        config,
        cluster,
    )
    assert {name for group in groups for name in settings_of(group)} <= set(info)
    assert (info["api_key"], info["log_format"], info["replicas"]) == (True, "json", 3)
    assert "sesame" not in asked.text


def test_what_the_self_check_found_is_told(engine):
    measured = (Measured("moved", 0.25, False, 300),)
    check = SelfCheck(False, "toy is served with exact reuse only", measured)
    app = build_app(engine, toy_card(engine.tokenizer), ServerConfig(), self_check=check)
    client = TestClient(app, base_url="http://localhost")
    assert client.get("/server_info").json()["fuzzy_self_check_result"] == {
        "passed": False,
        "sentence": "toy is served with exact reuse only",
        "prompts": 1,
        "kl_mean": 0.25,
        "decoy_answers": 0,
    }


def test_the_openapi_document_describes_every_route(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/flush_cache", "/metrics"} <= set(paths)
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert "$ref" in body["schema"]


def value(client, name):
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_metrics_carry_sglang_names(client, engine):
    before = {
        name: value(client, name)
        for name in ("kvweave:num_requests_total", "kvweave:inter_token_latency_seconds_count")
    }
    engine.hold = "prefill"
    held = threading.Thread(
        target=lambda: client.post("/v1/completions", json={"prompt": "x", "max_tokens": 6})
    )
    held.start()
    assert eventually(lambda: value(client, "kvweave:num_running_reqs") == 1)
    assert value(client, "kvweave:num_used_tokens") == 16
    assert value(client, "kvweave:token_usage") == 0.01
    engine.hold = None
    held.join()
    assert value(client, "kvweave:num_running_reqs") == 0
    for tier in ("exact", "moved", "paraphrase"):
        tokens = f'cached_tokens_total{{cache_source="device",model_name="toy",tier="{tier}"}}'
        assert f"kvweave:{tokens}" in client.get("/metrics").text
    for name in ("num_queue_reqs", "generation_tokens_total", "num_retracted_requests_total"):
        assert f"kvweave:{name}{{" in client.get("/metrics").text
    assert value(client, "kvweave:num_requests_total") == before["kvweave:num_requests_total"] + 1
    gaps = value(client, "kvweave:inter_token_latency_seconds_count")
    assert gaps == before["kvweave:inter_token_latency_seconds_count"] + 5
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert value(client, f"kvweave:{name}_count") > 0


def test_metrics_tell_what_was_healed(client):
    assert value(client, "kvweave:num_heal_queue_prompts{") == 3
    assert value(client, "kvweave:healed_prompts_total") == 5
    assert value(client, "kvweave:healed_tokens_total") == 700
    assert value(client, "kvweave:preempted_heals_total") == 2
    assert value(client, "kvweave:dropped_heals_total") == 1
    assert client.get("/server_info").json()["engine"]["healed"] == 5


def test_metrics_tell_who_proposed_reuse_and_what_was_refused(client):
    assert value(client, "kvweave:paraphrase_refused_total") == 5
    for series, expected in (
        ('paraphrase_refused_total{model_name="toy",reason="facts"}', 4),
        ('fuzzy_provider_events_total{event="late",model_name="toy"}', 2),
        ('fuzzy_provider_figures{figure="passages",model_name="toy"}', 31),
    ):
        assert value(client, f"kvweave:{series}") == expected, series
    told = client.get("/server_info").json()["engine"]
    assert told["paraphrase_refused"] == {"facts": 4, "question": 1}
    assert told["provider_events"]["asked"] == 9
    assert told["provider_figures"] == {"passages": 31}


def test_tokens_there_and_back(client):
    answer = client.post("/tokenize", json={"prompt": "a€", "return_token_strs": True}).json()
    assert answer["count"] == 4
    assert answer["token_strs"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    text = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert text == {"prompt": "a€", "text": "a€"}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert client.post("/tokenize", json=chat).json()["count"] == 19


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user"}]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "x"}),
        ("/abort_request", {}),
    ],
)
def test_what_makes_no_sense_is_refused(client, path, body):
    assert client.post(path, json=body).status_code == 400


def test_flushing(client, engine):
    assert client.post("/flush_cache").json()["success"]
    assert client.post("/flush_cache?timeout=2").json()["success"]
    engine.busy_flush = True
    assert client.post("/flush_cache").status_code == 409
    for wrong in ("-1", "nan", "inf", "soon"):
        assert client.post(f"/flush_cache?timeout={wrong}").status_code == 400


def test_aborting_ends_an_answer_where_it_is(client, engine):
    engine.hold = "decode"
    answers = []
    body = {"prompt": ["x", "y"], "max_tokens": 50, "rid": "mine"}
    asking = threading.Thread(
        target=lambda: answers.append(client.post("/v1/completions", json=body).json())
    )
    asking.start()
    assert eventually(lambda: list(engine.phases.values()) == ["decode"] * 2)
    assert client.post("/abort_request", json={"rid": "other"}).json()["aborted"] == 0
    assert client.post("/abort_request", json={"rid": "mine"}).json()["aborted"] == 1
    asking.join()
    assert [choice["finish_reason"] for choice in answers[0]["choices"]] == ["abort"] * 2
    assert [choice["text"] for choice in answers[0]["choices"]] == ["T", "T"]


def test_the_log_has_numbers_and_never_text(server, client, engine, caplog):
    server.app.state.service.config = ServerConfig(log_requests=True)
    caplog.set_level(logging.INFO, "kvweave.server.requests")
    engine.usage = Usage(reuse=Reuse(exact=3))
    client.post("/v1/completions", json={"prompt": "secret", "max_tokens": 4, "rid": "mine"})
    server.app.state.service.config = server.config
    [line] = [record.getMessage() for record in caplog.records if "rid=mine" in record.getMessage()]
    words = dict(part.split("=") for part in line.split())
    assert words["endpoint"] == "completions"
    assert words["outcome"] == "length"
    assert (words["prompt_tokens"], words["cached_tokens"]) == ("6", "3")
    assert words["completion_tokens"] == "4"
    assert float(words["first_token_ms"]) <= float(words["total_ms"])
    assert "secret" not in caplog.text
    assert "quick" not in caplog.text


def test_in_json_every_line_is_an_object_that_names_its_request(server, client, engine, caplog):
    server.app.state.service.config = ServerConfig(log_requests=True)
    caplog.set_level(logging.INFO)
    engine.error_after = 2
    caplog.handler.setFormatter(JsonFormatter())  # in the task that logs, where the rid is known
    body = {"prompt": "x", "max_tokens": 4, "rid": "mine", "stream": True}
    client.post("/v1/completions", json=body)
    server.app.state.service.config = server.config
    lines = [json.loads(line) for line in caplog.handler.stream.getvalue().splitlines()]
    access, ended, failed = (line for line in lines if line.get("rid") == "mine")
    assert access["logger"] == "uvicorn.access"
    assert ended["message"] == "request ended"
    assert (ended["outcome"], ended["prompt_tokens"]) == ("error", 1)
    assert ended["total_ms"] > 0
    assert failed["level"] == "warning"
    assert "step broke" in failed["message"]


def test_a_line_of_json_holds_whatever_was_logged():
    try:
        raise ValueError("two\nlines \ud800")
    except ValueError:
        record = logging.LogRecord(
            "uvicorn.error", logging.ERROR, "f", 1, "%s %d", ("said", 3), sys.exc_info()
        )
    record.rid = "r1"
    line = JsonFormatter().format(record)
    assert "\n" not in line.encode().decode()
    shown = json.loads(line)
    assert (shown["level"], shown["logger"], shown["rid"]) == ("error", "uvicorn.error", "r1")
    assert shown["message"] == "said 3"
    assert "ValueError: two\nlines" in shown["exception"]
    assert shown["time"].endswith("Z")


def test_others_lines_are_objects_too():
    code = (
        "from kvweave.server.logs import configure_logging; configure_logging('info', 'json')\n"
        "import warnings; warnings.warn('mind the gap')\n"
        "from transformers.utils import logging; logging.get_logger('transformers.x').error('oh')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    warned, told = map(json.loads, ran.stderr.splitlines())
    assert "mind the gap" in warned["message"]
    assert (told["logger"], told["message"]) == ("transformers.x", "oh")
