"""The command `kvweave`: subcommands, and one sentence for everything that goes wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import typer

from kvweave.cli.bench import bench
from kvweave.cli.chat import chat
from kvweave.cli.check_model import check_model
from kvweave.cli.demo import demo
from kvweave.cli.flags import PASS_UNKNOWN
from kvweave.cli.generate import generate
from kvweave.cli.info import info
from kvweave.cli.serve import serve
from kvweave.errors import KvweaveError
from kvweave.version import __version__

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
    """Serves language models and never computes the same text twice."""


def build_cli() -> typer.Typer:
    """The typer application with all subcommands."""
    cli = typer.Typer(add_completion=False, rich_markup_mode=None, epilog=_EPILOG)
    cli.callback()(_kvweave)
    commands: tuple[Callable[..., None], ...] = (
        *(serve, generate, chat, demo),
        *(check_model, bench, info),
    )
    for command in commands:
        cli.command(context_settings=PASS_UNKNOWN, epilog=_EPILOG)(command)
    return cli


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; never returns normally."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    debug = "--debug" in given or os.environ.get("KVWEAVE_DEBUG", "") not in ("", "0")
    # Wherever it stands: a command that failed is run again with it at the end.
    given = [argument for argument in given if argument != "--debug"]
    try:
        code = build_cli()(args=given, prog_name="kvweave", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `kvweave ... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        print(f"kvweave: {_sentence(error)}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    sys.exit(code if isinstance(code, int) else 0)


def _sentence(error: Exception) -> str:
    """What went wrong, on one line."""
    if isinstance(error, KvweaveError):
        text = str(error)
    elif hasattr(error, "format_message"):  # typer's own usage errors
        text = error.format_message()
    else:
        text = f"unexpected {type(error).__name__}: {error} (--debug shows where)"
    return " ".join(text.split()).rstrip(".")


if __name__ == "__main__":
    main()
