"""An engine in this process, for commands that answer without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from kvweave.config import EngineConfig
from kvweave.config.base import flag, flag_name, values_of
from kvweave.engine.types import SamplingParams
from kvweave.errors import RequestError

if TYPE_CHECKING:
    from kvweave.engine.async_engine import AsyncEngine
    from kvweave.models.cache import Progress
    from kvweave.server.prompts import PromptReader


@contextmanager
def loading_bar() -> Iterator[Progress]:
    """Gives what `models.load_model` reports to: (what, done, total). Bars vanish at the end."""
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
        """What the engine is told."""
        return SamplingParams(**values_of(self), **more)


@dataclass(frozen=True, slots=True)
class Session:
    """A running engine, and what turns text into its prompts."""

    engine: AsyncEngine
    reader: PromptReader
    name: str
    """The model's."""


@contextmanager
def open_session(config: EngineConfig) -> Iterator[Session]:
    """Load the model, run the engine within the block."""
    # Here: they load torch and the models' code, which takes seconds.
    from kvweave.engine.async_engine import AsyncEngine
    from kvweave.engine.engine import Engine
    from kvweave.engine.selfcheck.gate import guarded
    from kvweave.models import load_model
    from kvweave.server.model_card import card_of
    from kvweave.server.prompts import PromptReader

    with loading_bar() as progress:
        loaded = load_model(config.model, progress)
        config, _ = guarded(config, loaded, progress)
        engine = AsyncEngine(Engine(config, loaded))
    asyncio.run(engine.start())
    try:
        card = card_of(loaded, config.model.tokenizer)
        yield Session(engine, PromptReader(loaded.tokenizer, card), card.name)
    finally:
        asyncio.run(engine.stop())
