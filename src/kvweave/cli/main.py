"""The command `kvweave`: its subcommands, `serve` and `bench` among them; one-sentence errors."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli.chat import chat, check_machine, generate, load_engine
from kvweave.cli.demo import demo
from kvweave.cli.flags import PASS_UNKNOWN, CommandWithGroups, takes_settings
from kvweave.cli.model import check_model, info, store
from kvweave.config import ClusterConfig, EngineConfig, ServerConfig
from kvweave.errors import ConfigError, KvweaveError, extra
from kvweave.plugins import moving_backends
from kvweave.version import __version__
from kvweave_bench.options import BENCHES, BenchOptions, check_name

if TYPE_CHECKING:
    from kvweave.server.model_card import EngineInfo
    from kvweave.server.streaming import ServingEngine

log = logging.getLogger("kvweave.server")


@takes_settings(config_file=True, engine=EngineConfig, server=ServerConfig, cluster=ClusterConfig)
def serve(
    engine: EngineConfig, server: ServerConfig, cluster: ClusterConfig, given: frozenset[str]
) -> None:
    """Serve a model over an OpenAI-compatible API."""
    if cluster.replicas == 1:
        check_machine(engine)
    from kvweave.server.app import bind
    from kvweave.server.connections import with_files
    from kvweave.server.logs import configure_logging

    configure_logging(server.log_level, server.log_format)
    engine.warn_without_effect(given)
    server = with_files(server)
    listening = bind(server)  # before the model is loaded, which takes a while
    with _leaving_on_sigterm(), _engines(engine, cluster) as (answering, facts):
        from kvweave.explorer.routes import build_app
        from kvweave.server.app import serve as run

        app = build_app(answering, facts.card, server, facts.config, facts.self_check, cluster)
        if server.open:
            log.warning(
                "anyone who reaches %s may use this server: there is no --api-key", server.host
            )

        if facts.card.sampling and server.sampling_defaults == "model":
            log.info(
                "requests that do not say otherwise are sampled as the model's generation_config "
                "has it: %s (--sampling-defaults openai: as OpenAI does)",
                ", ".join(f"{name} {value:g}" for name, value in facts.card.sampling.items()),
            )

        def ready(url: str) -> None:
            pool = answering.snapshot().total_tokens
            backend = facts.config.cache.prefix_cache_backend
            behind = "" if cluster.replicas == 1 else f"{cluster.replicas} replicas, "
            _say(
                f"kvweave serves {facts.card.name} at {url}/v1 "
                f"({behind}{backend} cache, room for {pool:,} tokens)"
            )
            if pool // cluster.replicas < facts.card.context_length:
                log.warning(
                    "the KV pool is smaller than the model's context of %s tokens: longer requests "
                    "are refused (--max-total-tokens, --mem-fraction-static)",
                    f"{facts.card.context_length:,}",
                )
            if server.explorer:
                _say(f"what each prompt reused: {url}/explorer")
            if backend not in moving_backends():
                _say(
                    f"{backend} reuses no text at other positions; what does: "
                    f"--prefix-cache-backend {' or '.join(moving_backends())}"
                )

        # Replicas that die are replaced; an engine of this process is not.
        run(app, server, listening, on_ready=ready, leave_with_engine=cluster.replicas == 1)


def _say(line: str) -> None:
    """Print to stdout; a closed stdout does not end the server."""
    try:
        typer.echo(line)
    except OSError as failure:
        log.warning("stdout cannot be written (%s): %s", failure.strerror, line)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # Python flushes stdout at exit


@contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the process and exits with 0, also while the model loads.

    By default SIGTERM kills the process on the spot and leaves its replicas in the cluster. The
    first process of a container ignores it.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _engines(
    config: EngineConfig, cluster: ClusterConfig
) -> Iterator[tuple[ServingEngine, EngineInfo]]:
    """One engine of this process, or replicas."""
    if cluster.replicas == 1:
        yield load_engine(config)
        return
    try:
        from kvweave.cluster.app import running_engines
    except ModuleNotFoundError as missing:
        raise ConfigError(
            [f"--replicas needs {missing.name}, which {extra('ray')} brings"]
        ) from None
    with running_engines(config, cluster) as (engine, facts):
        yield engine, facts


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
