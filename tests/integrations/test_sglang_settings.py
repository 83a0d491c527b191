"""Settings from the environment and a file, and the errors in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvweave.errors import ConfigError
from kvweave.integrations.sglang.checks import NAMES, PluginConfig, read_settings


def test_without_settings_the_engines_defaults_hold() -> None:
    assert read_settings({}) == PluginConfig()
    assert all(hasattr(PluginConfig(), name) for name in NAMES)


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvweave.json"
    file.write_text(json.dumps({"min_span": 64, "max_share": 0.5}))
    found = read_settings({"KVWEAVE_SGLANG_CONFIG": str(file), "KVWEAVE_FUZZY_MIN_SPAN": "96"})
    assert (found.min_span, found.max_share) == (96, 0.5)


@pytest.mark.parametrize(
    ("environment", "file", "words"),
    [
        ({"KVWEAVE_FUZZY_MIN_SPAN": "many"}, None, "MIN_SPAN takes a whole number, not 'many'"),
        ({"KVWEAVE_FUZZY_STRIDE": "1.5"}, None, "takes a whole number"),
        ({"KVWEAVE_FUZZY_MAX_SHARE": "2"}, None, "KVWEAVE_FUZZY_MAX_SHARE is a share"),
        ({"KVWEAVE_FUZZY_MAX_SHARE": "nan"}, None, "KVWEAVE_FUZZY_MAX_SHARE is a share"),
        ({"KVWEAVE_FUZZY_MIN_SPAN": "20"}, None, "below 2 x KVWEAVE_FUZZY_STRIDE - 1 = 31"),
        ({"KVWEAVE_FUZZY_PROVIDER": "mine"}, None, "no setting of the plug-in; it has KVWEAVE_"),
        ({"KVWEAVE_FUZZY_MIN_CHUNK_SPAN": "0"}, None, "FUZZY_MIN_CHUNK_SPAN must be 1 or more"),
        ({"KVWEAVE_FUZZY_REFRESH_TOKENS": "-1"}, None, "REFRESH_TOKENS must be 0 or more"),
        ({}, '{"colour": 1}', "'colour' in "),
        ({}, '{"stride": true}', "takes a whole number, not True"),
        ({}, '{"stride": 16.5}', "takes a whole number, not 16.5"),
        ({}, '{"stride": Infinity}', "takes a whole number, not inf"),
        ({}, "[1]", "must hold one JSON object"),
        ({}, "{", "cannot be read as JSON"),
        ({"KVWEAVE_SGLANG_CONFIG": "/nowhere/at/all"}, None, "cannot be read as JSON"),
    ],
)
def test_what_does_not_work_is_said(
    environment: dict[str, str], file: str | None, words: str, tmp_path: Path
) -> None:
    if file is not None:
        (tmp_path / "settings.json").write_text(file)
        environment = {**environment, "KVWEAVE_SGLANG_CONFIG": str(tmp_path / "settings.json")}
    with pytest.raises(ConfigError) as error:
        read_settings(environment)
    assert words in str(error.value)


def test_all_problems_are_named_at_once() -> None:
    wrong = {"KVWEAVE_FUZZY_STRIDE": "x", "KVWEAVE_FUZZY_MIN_SUFFIX": "0", "KVWEAVE_FUZZY_A": "1"}
    with pytest.raises(ConfigError) as error:
        read_settings(wrong)
    assert len(error.value.problems) == 3
