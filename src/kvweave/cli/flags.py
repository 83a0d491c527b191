"""The command line's flags and the files of --config, derived from the dataclasses of settings.

A field is a flag: its name gives the spelling, its annotation the type, its metadata the help and
the choices. All problems of a command line, and of the file that it names, are reported together:
unreadable values, unknown names, and what `problems()` finds.

A file holds names and values of flags, in YAML or JSON. Values are read from their spelling, as the
command line reads them: YAML's `on` is the word, not a truth value. Every problem is reported with
its line.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer
import yaml
from typer.core import TyperCommand

from kvweave.config.base import as_flag, did_you_mean, groups_of, kinds_of, make, read, settings_of
from kvweave.plugins import choices_of

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


PASS_UNKNOWN = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Context settings of commands with derived flags: unknown ones come here to be reported."""

_METAVARS: dict[type, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT"}

_CONFIG_FILE = typer.Option(
    None,
    "--config",
    help="YAML or JSON file of flags, without their dashes in front; flags themselves go first.",
    metavar="FILE",
    envvar="KVWEAVE_CONFIG",
    show_envvar=False,
)


def takes_settings(
    *, config_file: bool = False, **groups: type
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a typer command take `groups`, by parameter name: dataclasses, or dataclasses of them.

    The command receives built, validated settings; typer sees one option per field instead, and
    with `config_file` a flag --config. A parameter `given` of the command receives the names of the
    settings that the command line, the environment or the file sets. Raises ConfigError with every
    problem at once.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        kinds = kinds_of(*groups.values())
        own = inspect.signature(command).parameters

        @functools.wraps(command)
        def run(ctx: typer.Context, **values: Any) -> None:
            flags = {name: values.pop(name) for name in kinds}
            file = values.pop("config", None)
            problems: list[str] = []
            said = [(name, value) for name, value in flags.items() if not _is_default(ctx, name)]
            given = read(said, kinds, problems, as_flag)
            problems += _unknown(ctx.args, values.values(), map(as_flag, kinds))
            if file is not None:
                given = read_settings(file, kinds, problems) | given
            built = make(groups.values(), given, problems)
            if "given" in own:
                values["given"] = frozenset(given)
            command(**values, **dict(zip(groups, built, strict=True)))

        run.__annotations__ = {}  # a setting may be called as its group is
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                _parameter("ctx", typer.Context),
                *_own_parameters(command, {*groups, "given"}),
                *([_parameter("config", str | None, _CONFIG_FILE)] if config_file else []),
                *(each for group in groups_of(*groups.values()) for each in _options(group, kinds)),
            ]
        )
        return run

    return decorate


class CommandWithGroups(TyperCommand):
    """A command whose --help lists its options under a heading per group of settings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section per heading, the command's own options last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                heading = getattr(parameter, "rich_help_panel", None) or "Options"
                sections.setdefault(heading, []).append(record)
        own = sections.pop("Options", [])
        for heading, records in (*sections.items(), ("Options", own)):
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=kind)


def _own_parameters(
    command: Callable[..., None], derived: Iterable[str]
) -> list[inspect.Parameter]:
    """Parameters of `command` that typer is to see as they are."""
    hints = typing.get_type_hints(command, include_extras=True)
    return [
        _parameter(name, hints[name], parameter.default)
        for name, parameter in inspect.signature(command).parameters.items()
        if name not in derived
    ]


def _options(group: type, kinds: Mapping[str, type]) -> list[inspect.Parameter]:
    """One typer option per setting. Values stay texts, which `read` converts with all problems."""
    found = []
    for name, item in settings_of(group).items():
        flag, kind = as_flag(name), kinds[name]
        shared: dict[str, Any] = {
            "help": item.metadata["help"],
            "envvar": f"KVWEAVE_{name.upper()}",
            "show_envvar": False,
            "show_default": item.default is not None,
            "rich_help_panel": re.sub(r"(Config|Options)$", " options", group.__name__),
        }
        if choices := choices_of(item.metadata.get("choices")):
            shared["help"] += f" One of {', '.join(choices)}."
        if kind is bool:
            option = typer.Option(item.default, f"{flag}/--no-{flag[2:]}", **shared)
            found.append(_parameter(name, bool, option))
        elif kind is tuple:
            shared |= {"help": shared["help"] + " Repeatable.", "show_default": False}
            option = typer.Option([], flag, metavar="TEXT", **shared)
            found.append(_parameter(name, list[str], option))
        else:
            option = typer.Option(item.default, flag, metavar=_METAVARS[kind], **shared)
            found.append(_parameter(name, str, option))
    return found


def _is_default(ctx: typer.Context, name: str) -> bool:
    """Neither the command line nor the environment sets it."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT"


def _unknown(extra: list[str], values: Iterable[Any], known: Iterable[str]) -> list[str]:
    """Problems of flags and arguments that the command does not have."""
    known, candidates = list(known), list(extra)
    for value in values:  # arguments take in what looks like an unknown flag
        candidates += value if isinstance(value, list) else [value]
    flags = [text for text in candidates if isinstance(text, str) and text.startswith("--")]
    problems = []
    for flag in (text.split("=", 1)[0] for text in flags):
        problems.append(f"there is no flag {flag}{did_you_mean(flag, known)}")
    if extra and not flags:
        problems.append(f"there is no place for the argument {extra[0]!r}")
    return problems
