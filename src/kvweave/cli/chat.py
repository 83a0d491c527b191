"""`kvweave generate` and `kvweave chat`, and what all commands share that load an engine here."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from kvweave.cli.flags import takes_settings
from kvweave.config import EngineConfig
from kvweave.config.base import flag, flag_name, values_of
from kvweave.errors import ConfigError, KvweaveError, RequestError
from kvweave.plugins import BACKENDS, FUZZY_PROVIDERS

if TYPE_CHECKING:
    from kvweave.engine.async_engine import AsyncEngine
    from kvweave.engine.types import Completion, SamplingParams, Usage
    from kvweave.models.cache import Progress
    from kvweave.server.model_card import EngineInfo
    from kvweave.server.prompts import PromptReader


@contextmanager
def loading_bar() -> Iterator[Progress]:
    """Give the `progress` argument of `models.load_model`; the bars vanish at the end."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                for earlier in tasks.values():
                    bar.update(earlier, visible=False)
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How answers are sampled."""

    max_tokens: int = flag(256, "Longest answer.")
    temperature: float = flag(0.7, "0 always takes the likeliest token.")
    top_p: float = flag(1.0, "Sample among the likeliest tokens that make up this probability.")
    top_k: int = flag(-1, "Sample among this many likeliest tokens; -1: all.")
    repetition_penalty: float = flag(1.0, "Above 1, what was said already becomes less likely.")
    seed: int | None = flag(None, "The same seed gives the same answer.")

    def problems(self) -> list[str]:
        try:
            self.params().validate()
        except RequestError as error:
            name = error.param or ""
            return [error.message.replace(name, flag_name(self, name), 1)]
        return []

    def params(self, **more: Any) -> SamplingParams:
        """The engine's form of these settings."""
        from kvweave.engine.types import SamplingParams  # imported here: it loads numpy

        return SamplingParams(**values_of(self), **more)


@dataclass(frozen=True, slots=True)
class Session:
    """A running engine, and the reader that turns text into prompts for it."""

    engine: AsyncEngine
    reader: PromptReader
    name: str
    """The model's."""


def check_machine(config: EngineConfig) -> None:
    """ConfigError for missing files, devices and packages that are found without loading torch."""
    found, fuzzy = config.model.missing(), config.fuzzy
    try:
        if BACKENDS[config.cache.prefix_cache_backend].moves and fuzzy.max_share > 0:
            FUZZY_PROVIDERS.check(fuzzy.provider, fuzzy)
    except ConfigError as error:
        found += error.problems
    if found:
        raise ConfigError(found)


def load_engine(config: EngineConfig) -> tuple[AsyncEngine, EngineInfo]:
    """Load and check the model, build the engine. It does not run yet."""
    check_machine(config)
    # Imported here: torch and the models' code take seconds to load.
    from kvweave.engine.async_engine import AsyncEngine
    from kvweave.engine.engine import Engine
    from kvweave.engine.selfcheck.gate import guarded
    from kvweave.models import load_model
    from kvweave.server.model_card import engine_info

    with loading_bar() as progress:
        loaded = load_model(config.model, progress)
        config, check = guarded(config, loaded, progress)
        engine = AsyncEngine(Engine(config, loaded))
    return engine, engine_info(loaded, config, check)


@contextmanager
def open_session(config: EngineConfig) -> Iterator[Session]:
    """Load the model; the engine runs within the block."""
    engine, facts = load_engine(config)
    from kvweave.server.prompts import PromptReader  # imported here: it loads FastAPI

    asyncio.run(engine.start())
    try:
        yield Session(engine, PromptReader(facts.tokenizer, facts.card), facts.card.name)
    finally:
        asyncio.run(engine.stop())


_Prompts = Annotated[
    list[str] | None, typer.Argument(help="Texts to continue; without any, standard input is one.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")]


@takes_settings(sampling=SamplingConfig, engine=EngineConfig)
def generate(
    sampling: SamplingConfig,
    engine: EngineConfig,
    given: frozenset[str],
    prompts: _Prompts = None,
    as_json: _Json = False,
) -> None:
    """Continue one or more prompts and print what comes."""
    texts = prompts or [_standard_input()]
    engine.warn_without_effect(given)
    with open_session(engine) as session:
        asyncio.run(_all(session, texts, sampling, as_json))


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise ConfigError(["there is no prompt: give one as an argument or on standard input"])
    return sys.stdin.read()


async def _all(session: Session, texts: list[str], sampling: SamplingConfig, as_json: bool) -> None:
    """Answer all prompts together and print in order; stream a single one."""
    alone = len(texts) == 1 and not as_json
    tasks = [
        asyncio.create_task(_one(session, place, text, sampling, show=alone))
        for place, text in enumerate(texts)
    ]
    for text, task in zip(texts, tasks, strict=True):
        answer = await task
        if as_json:
            typer.echo(json.dumps(_as_object(text, answer), ensure_ascii=False))
        else:
            typer.echo("" if alone else answer.text)


async def _one(
    session: Session, place: int, text: str, sampling: SamplingConfig, *, show: bool
) -> Completion:
    from kvweave.engine.types import Completion, GenerateRequest  # imported here: it loads numpy

    answer = Completion()
    request = GenerateRequest(
        rid=f"prompt-{place}",
        prompt_ids=await session.reader.read(text),
        sampling=sampling.params(),
    )
    async for delta in session.engine.generate(request):
        if show:
            typer.echo(delta.text, nl=False)
            sys.stdout.flush()
        answer.extend(delta)
        if answer.error is not None:
            raise KvweaveError(f"prompt {place + 1} failed: {answer.error}")
    return answer


def _as_object(prompt: str, answer: Completion) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": dataclasses.asdict(answer.usage),
    }


_HELP = (
    "/new starts over, /help shows this, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer. "
    "The arrow keys edit the line and recall earlier ones."
)
_REMEMBERED = 1000
"""Lines of input that are kept for the next conversation."""


@takes_settings(sampling=SamplingConfig, engine=EngineConfig)
def chat(sampling: SamplingConfig, engine: EngineConfig, given: frozenset[str]) -> None:
    """Talk to a model in the terminal."""
    console = Console(highlight=False)
    engine.warn_without_effect(given)
    with open_session(engine) as session, _line_editing():
        console.print(f"{session.name}. {_HELP}", style="dim", soft_wrap=True)
        conversation = Conversation(session, sampling, console)
        while (line := _read()) is not None:
            if line == "/new":
                conversation.messages.clear()
            elif line == "/help":
                console.print(_HELP, style="dim", soft_wrap=True)
            elif line.startswith("/") and " " not in line:
                console.print(f"There is no {line}. {_HELP}", style="dim", soft_wrap=True)
            elif line:
                with _silent_keys():
                    conversation.turn(line)


def _read() -> str | None:
    """One line of input; None at its end."""
    try:
        line = input("> ").strip()  # not rich's: readline has to know the prompt
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if line == "/quit" else line


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Editing and history of input lines, where this Python has readline and stdin is a terminal.

    The history is kept in the cache folder, readable for its owner only.
    """
    try:
        import readline
    except ImportError:
        readline = None  # type: ignore[assignment]
    if readline is None or not sys.stdin.isatty():
        yield
        return
    from kvweave.models.cache import cache_folder  # imported here: its package loads torch

    folder = cache_folder()
    file = folder / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.set_history_length(_REMEMBERED)
            readline.write_history_file(file)


@contextlib.contextmanager
def _silent_keys() -> Iterator[None]:
    """Keys typed during an answer are not echoed into it; the next line of input begins with them.

    Does nothing where stdin is no terminal.
    """
    if os.name != "posix" or not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    silent = list(before)
    silent[3] &= ~termios.ECHO  # the local modes
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@dataclass
class Conversation:
    """The conversation so far, in `messages`."""

    session: Session
    sampling: SamplingConfig
    console: Console
    messages: list[dict[str, str]] = field(default_factory=list)
    _turns: int = 0

    def turn(self, line: str) -> None:
        """Send `line`, print the answer as it comes. A turn that fails leaves no message."""
        self.messages.append({"role": "user", "content": line})
        try:
            answer = asyncio.run(self._answer())
        except KvweaveError as error:
            self.messages.pop()
            self.console.print(f"{error}", style="red", markup=False)
        except KeyboardInterrupt:
            self.messages.pop()
            self.console.print("\n(stopped)", style="dim")
        else:
            self.messages.append({"role": "assistant", "content": answer})

    async def _answer(self) -> str:
        # Imported here: they load numpy and the server's parts.
        from kvweave.engine.types import GenerateRequest, Usage
        from kvweave.server.prompts import ChatPrompt

        self._turns += 1
        prompt, _ = await self.session.reader.conversation(ChatPrompt(messages=self.messages))
        request = GenerateRequest(
            rid=f"turn-{self._turns}", prompt_ids=prompt, sampling=self.sampling.params()
        )
        started, first = time.perf_counter(), 0.0
        answer, tokens, usage = "", 0, Usage()
        async for delta in self.session.engine.generate(request):
            if delta.error is not None:
                raise RequestError(delta.error)
            first = first or time.perf_counter() - started
            self.console.print(delta.text, end="", markup=False, soft_wrap=True)
            answer, tokens, usage = answer + delta.text, tokens + len(delta.token_ids), delta.usage
        self.console.print()
        account = _account(usage, tokens, first, time.perf_counter() - started)
        self.console.print(account, style="dim", soft_wrap=True)
        return answer


def _account(usage: Usage, tokens: int, first: float, total: float) -> str:
    """What the turn cost; times in seconds from its submission."""
    moved = f", {usage.moved_tokens} moved" if usage.moved_tokens else ""
    speed = (
        f" at {(tokens - 1) / (total - first):.1f} tokens/s" if tokens > 1 and total > first else ""
    )
    return (
        f"(prompt: {usage.prompt_tokens} tokens, {usage.cached_tokens} cached{moved}; "
        f"first token after {1000 * first:,.0f} ms; answer: {tokens} tokens{speed})"
    )
