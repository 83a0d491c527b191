"""A file of settings: the names and values of flags, in YAML, of which JSON is a part.

Values are read as the command line reads them, from their spelling: `on` is the word, not a truth
value, and what is wrong is said of the line where it stands.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
}
"""The types of settings, in words."""

_TRUTHS = {"true": True, "false": False}
_UNSET = frozenset({"", "null", "~"})


def read_settings(file: str, kinds: Mapping[str, type], problems: list[str]) -> dict[str, Any]:
    """The settings in `file`, by field name; `kinds` are the fields there are.

    Names may be spelt with dashes or with underscores. Null leaves a setting as it is. All that is
    wrong, with the file itself, with names or with values, is added to `problems`.
    """
    settings: dict[str, Any] = {}
    seen: set[str] = set()
    for key, value in _entries(file, problems):
        where = f"{file}, line {key.start_mark.line + 1}"
        name = key.value.replace("-", "_") if isinstance(key, yaml.ScalarNode) else ""
        spelt = name.replace("_", "-")
        if name not in kinds:
            known = [each.replace("_", "-") for each in kinds]
            hint = did_you_mean(spelt, known)
            problems.append(f"{where}: there is no setting {spelt or 'of that form'}{hint}")
        elif name in seen:
            problems.append(f"{where}: {spelt} is set twice")
        elif not isinstance(value, yaml.ScalarNode):
            problems.append(f"{where}: {spelt} takes one value; put quotes around what is JSON")
        elif value.value not in _UNSET or value.style:
            try:
                settings[name] = _read(kinds[name], value.value)
            except (ValueError, KeyError):
                problems.append(f"{where}: {spelt} takes {KINDS[kinds[name]]}, not {value.value!r}")
        seen.add(name)
    return settings


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """A hint at the name that was probably meant, if one is near."""
    close = difflib.get_close_matches(wrong, list(known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _entries(file: str, problems: list[str]) -> list[tuple[yaml.Node, yaml.Node]]:
    try:
        # Nodes have lines and spellings; objects made of them would have lost both.
        root = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as failure:
        problems.append(f"--config {file} cannot be read: {failure.strerror or failure}")
    except UnicodeDecodeError:
        problems.append(f"--config {file} is not text in UTF-8")
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


def _read(kind: type, text: str) -> Any:
    return _TRUTHS[text.lower()] if kind is bool else kind(text)
