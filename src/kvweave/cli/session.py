"""An engine in this process, for commands that answer without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvweave.cli.progress import loading_bar
from kvweave.config import EngineConfig

if TYPE_CHECKING:
    from kvweave.engine.async_engine import AsyncEngine
    from kvweave.server.prompts import PromptReader


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
