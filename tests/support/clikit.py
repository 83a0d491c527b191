"""Runs a command of the command line in this process."""

from __future__ import annotations

import typer

from kvweave.cli.flags import PASS_UNKNOWN


def run(command, *arguments):
    cli = typer.Typer(rich_markup_mode=None, add_completion=False)
    cli.command(context_settings=PASS_UNKNOWN)(command)
    return cli(args=list(arguments), standalone_mode=False)
