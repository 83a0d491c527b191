"""The setting of a bench run: one loaded model for all variants, texts, options, the console."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property

from rich.console import Console

from kvweave.config import ModelConfig
from kvweave.models.load import LoadedModel, load_model
from kvweave_bench.measure import progress_bar
from kvweave_bench.options import BenchOptions
from kvweave_bench.texts import Text, load
from kvweave_bench.workloads.corpus import Corpus


class Setting:
    """Options, and what they cost to provide: nothing is loaded before a bench asks for it."""

    def __init__(self, options: BenchOptions, n: int, console: Console) -> None:
        self.options = options
        self.n = n
        """Cases or rounds, as the bench counts them."""
        self.console = console
        self._origins: dict[str, str] = {}

    @property
    def seed(self) -> int:
        return self.options.seed

    @property
    def quick(self) -> bool:
        return self.options.quick

    @cached_property
    def model_config(self) -> ModelConfig:
        # Not `auto`, so that float models give the same figures on every processor.
        return ModelConfig(
            model=self.options.model, quantization=self.options.quantization, dtype="float32"
        )

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model, loaded once: weights are shared by all variants, caches never are."""
        return load_model(self.model_config)

    @cached_property
    def corpus(self) -> Corpus:
        tokenizer = self.loaded.tokenizer
        return Corpus(lambda text: tokenizer.encode(text, add_special_tokens=False), self.seed)

    @property
    def model_name(self) -> str | None:
        """The model that was measured; None if the bench never asked for one."""
        return self.loaded.name if "loaded" in self.__dict__ else None

    @property
    def text_origins(self) -> dict[str, str]:
        """Packages and versions of the texts that were read."""
        return self._origins | (self.corpus.origins if "corpus" in self.__dict__ else {})

    def texts(self, name: str) -> tuple[Text, ...]:
        """A source's texts as they are, for benches that need no model to read them."""
        found = load(name)
        self._origins[name] = found.origin
        return found.texts

    def progress(self, what: str, total: int) -> AbstractContextManager[Callable[[], None]]:
        """A bar on the screen; gives the function that advances it by one."""
        return progress_bar(self.console, what, total)
