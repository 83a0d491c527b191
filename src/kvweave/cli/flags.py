"""The command line's flags, derived from the frozen dataclasses of settings.

A field is a flag: its name gives the spelling, its annotation the type, its metadata the help and
the choices. Nothing is written twice. All that is wrong with a command line, and with the file of
settings that it names, is reported together: unreadable values, unknown names, and what
`problems()` finds.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass
from typing import Any

import typer

from kvweave.cli.settings_file import KINDS, did_you_mean, read_settings
from kvweave.config import validate
from kvweave.config.base import build, groups_of, leaves_of, settings_of
from kvweave.errors import ConfigError
from kvweave.plugins import choices_of

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


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a value until all problems are known."""

    problem: str


def takes_settings(
    *, config_file: bool = False, **groups: type
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a typer command take `groups`, by parameter name: dataclasses, or dataclasses of them.

    The command receives built, validated settings; typer sees one option per field instead, and
    with `config_file` a flag --config. Raises ConfigError with every problem at once.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        leaves = [leaf for kind in groups.values() for leaf in leaves_of(kind)]
        kinds = {
            name: _kind(leaf, item) for leaf in leaves for name, item in settings_of(leaf).items()
        }
        flags = {name: "--" + name.replace("_", "-") for name in kinds}

        @functools.wraps(command)
        def run(ctx: typer.Context, **values: Any) -> None:
            given = {name: values.pop(name) for name in flags}
            file = values.pop("config", None) if config_file else None
            problems = [v.problem for v in given.values() if isinstance(v, _Unreadable)]
            problems += _unknown(ctx.args, values, flags.values())
            if file is not None:
                filed = read_settings(file, kinds, problems)
                given.update({n: v for n, v in filed.items() if _is_default(ctx, n)})
            readable = {n: v for n, v in given.items() if not isinstance(v, _Unreadable)}
            built = {name: build(kind, readable) for name, kind in groups.items()}
            try:
                validate(*(leaf for group in built.values() for leaf in groups_of(group)))
            except ConfigError as error:
                problems += error.problems
            if problems:
                raise ConfigError(problems)
            command(**values, **built)

        signature = _signature(command, groups, leaves, config_file)
        run.__signature__ = signature  # type: ignore[attr-defined]
        return run

    return decorate


def _signature(
    command: Callable[..., None],
    groups: Mapping[str, type],
    leaves: list[type],
    config_file: bool,
) -> inspect.Signature:
    keyword = inspect.Parameter.KEYWORD_ONLY
    hints = typing.get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(kind=keyword, annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name not in groups
    ]
    derived = [
        inspect.Parameter(
            name,
            keyword,
            default=_option(_kind(leaf, item), name, item),
            annotation=_kind(leaf, item),
        )
        for leaf in leaves
        for name, item in settings_of(leaf).items()
    ]
    if config_file:
        own.append(
            inspect.Parameter("config", keyword, default=_CONFIG_FILE, annotation=str | None)
        )
    ctx = inspect.Parameter("ctx", keyword, annotation=typer.Context)
    return inspect.Signature([ctx, *own, *derived])


def _is_default(ctx: typer.Context, name: str) -> bool:
    """Neither the command line nor the environment says anything about it."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT"


def _kind(group: type, item: Field[Any]) -> type:
    """The type of one value: `int | None` is int."""
    hint = typing.get_type_hints(group)[item.name]
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    kind: type = hint
    return kind


def _option(kind: type, name: str, item: Field[Any]) -> Any:
    flag = "--" + name.replace("_", "-")
    shared: dict[str, Any] = {
        "help": item.metadata["help"],
        "envvar": f"KVWEAVE_{name.upper()}",
        "show_envvar": False,
        "show_default": item.default is not None,
    }
    if kind is bool:
        return typer.Option(item.default, f"{flag}/--no-{flag[2:]}", **shared)
    if choices := choices_of(item.metadata.get("choices")):
        shared["help"] += f" One of {', '.join(choices)}."
    reader = _reader(kind, flag)
    return typer.Option(item.default, flag, parser=reader, metavar=_METAVARS[kind], **shared)


def _reader(kind: type, flag: str) -> Callable[[Any], Any]:
    def read(text: Any) -> Any:
        try:
            return kind(text) if isinstance(text, str) else text
        except ValueError:
            return _Unreadable(f"{flag} takes {KINDS[kind]}, not {text!r}")

    return read


def _unknown(extra: list[str], values: Mapping[str, Any], known: Any) -> list[str]:
    """What no flag or argument of the command accounts for."""
    candidates = list(extra)
    for value in values.values():  # arguments take in what looks like an unknown flag
        candidates += value if isinstance(value, list) else [value]
    flags = [text for text in candidates if isinstance(text, str) and text.startswith("--")]
    problems = []
    for flag in (text.split("=", 1)[0] for text in flags):
        problems.append(f"there is no flag {flag}{did_you_mean(flag, known)}")
    if extra and not flags:
        problems.append(f"there is no place for the argument {extra[0]!r}")
    return problems
