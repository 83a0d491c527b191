"""--config: settings by their flags' names, overridden by flags and environment; all problems."""

import json
from dataclasses import fields

import pytest

from kvweave.config import EngineConfig, ServerConfig
from kvweave.config.base import values_of
from kvweave.errors import ConfigError
from support.clikit import run


@pytest.fixture
def filed(tmp_path):
    def write(text):
        file = tmp_path / "kvweave.yaml"
        file.write_text(text)
        return str(file)

    return write


def test_flags_and_environment_win_over_the_file(command, seen, filed, monkeypatch):
    monkeypatch.setenv("KVWEAVE_PORT", "2")
    file = filed(
        "# ours\nport: 1\nhost: '::1'\npage-size: 32\nmem_fraction_static: 0.25\n"
        "fuzzy-self-check: on\nlog-requests: true\nserved-model-name: '1e3'\nrevision: null\n"
    )
    run(command, "--config", file, "--page-size", "16")  # the default's value, but said
    server, engine = seen["server"], seen["engine"]
    assert (server.port, server.host, server.log_requests) == (2, "::1", True)
    assert (engine.cache.page_size, engine.cache.mem_fraction_static) == (16, 0.25)
    assert (engine.model.served_model_name, engine.model.revision) == ("1e3", None)
    assert engine.fuzzy.self_check == "on", "YAML takes on for true"
    monkeypatch.setenv("KVWEAVE_CONFIG", filed("log-requests: true"))
    run(command, "--no-log-requests")
    assert seen["server"] == ServerConfig(port=2)


def test_a_repeatable_flag_is_one_text_or_a_list(command, seen, filed):
    run(command, "--config", filed("volatile-head: [b c, a]"))
    assert seen["server"].volatile_head == ("b c", "a")
    run(command, "--config", filed("volatile-head: b c"))
    assert seen["server"].volatile_head == ("b c",)
    with pytest.raises(ConfigError, match="line 1: volatile-head takes texts, not"):
        run(command, "--config", filed("volatile-head: [[a]]"))


def test_json_with_every_setting_is_read_back(command, seen, filed):
    engine = EngineConfig()
    everything = values_of(*(getattr(engine, each.name) for each in fields(engine)), ServerConfig())
    run(command, "--config", filed(json.dumps(everything, indent=1)))
    assert seen == {"engine": EngineConfig(), "server": ServerConfig()}


def test_all_problems_of_a_file_are_reported_with_their_lines(command, seen, filed):
    file = filed(
        "port: http\npagesize: 3\npage-size: 0\npage_size: 8\n? [a]\n: 1\n"
        "kv-events-config: {hwm: 1}\nlog-requests: 7\nlog-level: loud\n"
    )
    with pytest.raises(ConfigError) as refused:
        run(command, "--config", file, "--max-body-bytes", "0", "--quux")
    assert list(refused.value.problems) == [
        "there is no flag --quux",
        f"{file}, line 1: port takes a whole number, not 'http'",
        f"{file}, line 2: there is no setting pagesize (did you mean page-size?)",
        f"{file}, line 4: page-size is set twice",
        f"{file}, line 5: there is no setting of that form",
        f"{file}, line 7: kv-events-config takes one value; put quotes around what is JSON",
        f"{file}, line 8: log-requests takes true or false, not '7'",
        "--page-size must be above 0, not 0",
        "--max-body-bytes must be above 0, not 0",
        "--log-level is one of debug, info, warning, error, not 'loud'",
    ]
    assert not seen


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is neither YAML nor JSON: .* in line 1"),
        ("- port", "must hold names with values"),
        (None, "cannot be read: No such file"),
    ],
)
def test_an_unreadable_file_is_refused_with_the_reason(command, filed, tmp_path, text, words):
    file = str(tmp_path / "none.yaml") if text is None else filed(text)
    with pytest.raises(ConfigError, match=words):
        run(command, "--config", file)


@pytest.fixture
def json_file(tmp_path):
    return tmp_path / "kvweave.json"


def test_an_invalid_json_file_is_refused(command, json_file):
    json_file.write_text('{"port": 1,\n "prefix_cache_backend": }')
    with pytest.raises(ConfigError, match=r"kvweave.json is no JSON: Expecting value in line 2"):
        run(command, "--config", str(json_file))


def test_json_indented_by_tabs_is_read(command, seen, json_file):
    json_file.write_text('{\n\t"port":\t1\n}')
    run(command, "--config", str(json_file))
    assert seen["server"] == ServerConfig(port=1)


def test_an_empty_file_changes_nothing(command, seen, filed):
    run(command, "--config", filed("# nothing yet\n"))
    assert seen["server"] == ServerConfig()
