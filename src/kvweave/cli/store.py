"""`kvweave store`: shows, checks and empties a folder of --kv-store."""

from __future__ import annotations

import sqlite3
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvweave.errors import ConfigError

DAMAGED = 1
"""Exit code of `verify` where something was damaged."""


class Action(str, Enum):
    """What to do with a folder."""

    INFO = "info"
    VERIFY = "verify"
    PURGE = "purge"


_Action = Annotated[Action, typer.Argument(help="info: count; verify: check; purge: delete.")]
_Folder = Annotated[Path, typer.Argument(help="The folder of --kv-store.")]


def store(action: _Action, folder: _Folder) -> None:
    """Show, check or empty a folder of --kv-store.

    verify reads every page and deletes damaged ones, unless a server uses the folder. purge deletes
    what no server uses.
    """
    from kvweave.store.pages import folders_in, purge  # imported here: it loads numpy

    try:
        found = folders_in(folder)
    except OSError as error:
        raise ConfigError([f"{folder} cannot be read: {error.strerror}"]) from None
    if not found:
        typer.echo(f"nothing is stored in {folder}")
    damaged = 0
    for each in found:
        if action is Action.PURGE:
            typer.echo(f"{each.name}  {'deleted' if purge(each) else 'kept: a server uses it'}")
        else:
            damaged += _show(each, verify=action is Action.VERIFY)
    if damaged:
        raise typer.Exit(DAMAGED)


def _show(folder: Path, *, verify: bool) -> int:
    """Print a line about one model's folder; returns how much of it was damaged."""
    from kvweave.store.pages import look_at

    try:
        facts = look_at(folder, verify=verify)
    except sqlite3.Error as error:
        typer.echo(
            f"{folder.name}  its catalogue is damaged ({error}): the next server starts anew"
        )
        return 1
    words = f"{facts.tokens:,} tokens in {facts.pages:,} pages, {facts.bytes / 1e9:.2f} GB"
    if facts.damaged is not None:
        fate = "not deleted while a server uses it" if facts.in_use else "deleted"
        words += f", {facts.damaged} damaged" + (f" ({fate})" if facts.damaged else "")
    typer.echo(f"{folder.name}  {words}{', in use' if facts.in_use else ''}")
    return facts.damaged or 0
