"""The command `kvweave`: its subcommands, `bench` among them, and errors as one sentence."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvweave.cli.chat import chat, generate
from kvweave.cli.demo import demo
from kvweave.cli.flags import PASS_UNKNOWN, CommandWithGroups, takes_settings
from kvweave.cli.model import check_model, info, store
from kvweave.cli.serve import serve
from kvweave.errors import ConfigError, KvweaveError
from kvweave.version import __version__
from kvweave_bench.options import BENCHES, BenchOptions, check_name

USAGE_ERROR = 2
INTERRUPTED = 130

_EPILOG = "Every flag can also be set in the environment: KVWEAVE_PAGE_SIZE=32 is --page-size 32."


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvweave {__version__}")
        raise typer.Exit


def _kvweave(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version),
    debug: bool = typer.Option(
        False, "--debug", help="Show where an error comes from; KVWEAVE_DEBUG=1 does the same."
    ),
) -> None:
    """Serves language models and reuses the KV cache of earlier prompts."""


_Name = Annotated[str | None, typer.Argument(help="Which benchmark; --list shows them.")]
_List = Annotated[bool, typer.Option("--list", help="Print what there is, and leave.")]
_Json = Annotated[Path | None, typer.Option("--json", help="File for the figures.", dir_okay=False)]


@takes_settings(options=BenchOptions)
def bench(
    options: BenchOptions, name: _Name = None, listed: _List = False, json: _Json = None
) -> None:
    """Measure, and print a table."""
    if listed:
        typer.echo("\n".join(f"{each:<17}{what}" for each, what in BENCHES.items()))
        return
    if name is None:
        raise ConfigError([f"name a benchmark: {', '.join(BENCHES)}"])
    check_name(name)
    from kvweave_bench.registry import run_bench  # imported here: it loads torch

    run_bench(name, options, json_path=json)


def build_cli() -> typer.Typer:
    """The typer application with all subcommands."""
    cli = typer.Typer(add_completion=False, rich_markup_mode=None, epilog=_EPILOG)
    cli.callback()(_kvweave)
    commands: tuple[Callable[..., None], ...] = (
        *(serve, generate, chat, demo),
        *(check_model, bench, info, store),
    )
    for command in commands:
        cli.command(cls=CommandWithGroups, context_settings=PASS_UNKNOWN, epilog=_EPILOG)(command)
    return cli


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; never returns normally."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    debug = "--debug" in given or os.environ.get("KVWEAVE_DEBUG", "") not in ("", "0")
    # --debug works in every place: users append it to the command that failed.
    given = [argument for argument in given if argument != "--debug"]
    try:
        code = build_cli()(args=given, prog_name="kvweave", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        print(f"kvweave: {_sentence(error)}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    sys.exit(code if isinstance(code, int) else 0)


def _sentence(error: Exception) -> str:
    """The error on one line."""
    if isinstance(error, KvweaveError):
        text = str(error)
    elif hasattr(error, "format_message"):  # typer's own usage errors
        text = error.format_message()
    else:
        text = f"unexpected {type(error).__name__}: {error} (--debug shows where)"
    return " ".join(text.split()).rstrip(".")


if __name__ == "__main__":
    main()
