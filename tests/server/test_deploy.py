"""The files in deploy/ name only metrics, flags and paths that exist."""

import json
import re
import subprocess
import sys
from configparser import ConfigParser
from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.cli.flags import read_settings
from kvweave.config import ClusterConfig, EngineConfig, ServerConfig
from kvweave.server.metrics import PREFIX, Metrics
from support.serverkit import FakeEngine, RunningServer

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((DEPLOY / "grafana-dashboard.json").read_text())


def expressions(dashboard):
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_shows_every_metric_and_no_other(dashboard):
    told = {"provider_events": {"asked": 1}, "provider_figures": {"passages": 1}}
    told |= {"paraphrase_refused": {"facts": 1}, "store_figures": {"stored_pages": 1}}
    metrics = Metrics("toy", lambda: replace(FakeEngine().snapshot(), **told))
    metrics.request_refused(429)
    families = list(metrics.registry.collect())
    samples = {sample.name for family in families for sample in family.samples}
    variables = [variable["query"] for variable in dashboard["templating"]["list"]]
    named = set(re.findall(rf"{PREFIX}\w+", " ".join([*expressions(dashboard), *variables])))
    assert named <= samples
    forgotten = [f.name for f in families if not any(name.startswith(f.name) for name in named)]
    assert not forgotten


def test_its_queries_are_whole_and_its_panels_do_not_overlap(dashboard):
    for expression in expressions(dashboard):
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), expression
        ranges = re.findall(rf"{PREFIX}\w+_(?:total|bucket)\{{[^}}]*\}}(\S?)", expression)
        assert all(after == "[" for after in ranges), f"a counter without rate: {expression}"
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def known_settings():
    groups = (*(type(group) for group in _groups(EngineConfig())), ServerConfig, ClusterConfig)
    return {name for group in groups for name in group.__dataclass_fields__}


def _groups(config):
    return [getattr(config, name) for name in config.__dataclass_fields__]


def test_the_example_of_settings_is_read():
    problems = []
    found = read_settings(
        str(DEPLOY / "kvweave.yaml"), dict.fromkeys(known_settings(), str), problems
    )
    assert not problems
    assert found["log_format"] == "json"


def test_the_container_sets_known_flags_and_is_not_root():
    text = (DEPLOY / "Containerfile").read_text()
    variables = {name.lower() for name in re.findall(r"\bKVWEAVE_(\w+)=\S", text)}
    assert variables - {"cache"} <= known_settings()
    assert re.search(r"^USER [1-9]", text, re.M), "by number, so that a cluster can see it"
    assert "/health" in text


def test_the_container_asks_whether_the_server_is_well():
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", "")
    [check] = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.M)
    command = [sys.executable, *json.loads(check)[1:]]
    engine = FakeEngine()
    with RunningServer(engine, ServerConfig(port=0, api_key="secret")) as server:
        port = server.url.rpartition(":")[2]
        for alive, status in ((True, 0), (False, 1)):
            engine.alive = alive
            ran = subprocess.run(command, env={"KVWEAVE_PORT": port}, check=False)
            assert ran.returncode == status


def test_the_unit_waits_longer_than_the_drain():
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / "kvweave.service")
    service = unit["Service"]
    assert "kvweave serve --config" in service["ExecStart"]
    assert int(service["TimeoutStopSec"]) >= ServerConfig().drain_seconds + 15
