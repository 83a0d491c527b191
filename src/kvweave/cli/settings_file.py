"""Files of settings, which --config names: the names and values of flags, in YAML or JSON.

Values are read from their spelling, as the command line reads them: YAML's `on` is the word, not a
truth value. Every problem is reported with its line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvweave.config.base import read

_NULL = "tag:yaml.org,2002:null"


def read_settings(file: str, kinds: Mapping[str, type], problems: list[str]) -> dict[str, Any]:
    """The settings in `file`, by name; `kinds` are the settings there are.

    Names may be spelt with dashes or with underscores. Null leaves a setting as it is. Problems of
    the file itself, of names and of values are added to `problems`.
    """
    settings: dict[str, Any] = {}
    seen: set[str] = set()
    for key, value in _entries(file, problems):
        where = f"{file}, line {key.start_mark.line + 1}: "
        name = key.value.replace("-", "_") if isinstance(key, yaml.ScalarNode) else ""
        spelt = _dashed(name)
        if not name:
            problems.append(f"{where}there is no setting of that form")
        elif name in seen:
            problems.append(f"{where}{spelt} is set twice")
        elif kinds.get(name) is tuple and isinstance(value, yaml.SequenceNode):
            texts = [getattr(each, "value", None) for each in value.value]
            settings |= read([(name, texts)], kinds, problems, _dashed, where)
        elif name in kinds and not isinstance(value, yaml.ScalarNode):
            problems.append(f"{where}{spelt} takes one value; put quotes around what is JSON")
        else:
            text = None if value.tag == _NULL else value.value
            settings |= read([(name, text)], kinds, problems, _dashed, where)
        seen.add(name)
    return settings


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _entries(file: str, problems: list[str]) -> Iterable[tuple[Any, Any]]:
    """Nodes of names and values: nodes have lines and spellings, unlike objects made of them."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        if file.endswith(".json"):
            json.loads(text)
            text = text.replace("\t", " ")  # white space in JSON, and an error in YAML
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as failure:
        problems.append(f"--config {file} cannot be read: {failure.strerror or failure}")
    except UnicodeDecodeError:
        problems.append(f"--config {file} is not text in UTF-8")
    except json.JSONDecodeError as failure:
        problems.append(f"--config {file} is no JSON: {failure.msg} in line {failure.lineno}")
    except yaml.YAMLError as failure:
        problems.append(f"--config {file} is neither YAML nor JSON: {_in_a_line(failure)}")
    else:
        if isinstance(root, yaml.MappingNode):
            return list(root.value)
        if root is not None:
            problems.append(f"--config {file} must hold names with values, such as 'port: 8000'")
    return []


def _in_a_line(failure: yaml.YAMLError) -> str:
    mark, words = getattr(failure, "problem_mark", None), getattr(failure, "problem", None)
    return f"{words or failure}{f' in line {mark.line + 1}' if mark else ''}"
