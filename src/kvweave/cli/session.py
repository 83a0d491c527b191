"""An engine in this process: loading with a progress bar, checks before it, sampling flags."""

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
from kvweave.errors import ConfigError, RequestError
from kvweave.plugins import BACKENDS, FUZZY_PROVIDERS

if TYPE_CHECKING:
    from kvweave.engine.async_engine import AsyncEngine
    from kvweave.engine.types import SamplingParams
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
