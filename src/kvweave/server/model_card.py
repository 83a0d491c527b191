"""Facts about the served model, as the endpoints for models show them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvweave.config import ModelConfig
from kvweave.errors import RequestError

if TYPE_CHECKING:
    from kvweave.config import EngineConfig
    from kvweave.engine.selfcheck.gate import SelfCheck
    from kvweave.models import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The served model. `context_length` counts prompt and output tokens together."""

    name: str
    path: str
    tokenizer_path: str
    context_length: int
    vocab_size: int
    model_type: str | None = None
    architectures: tuple[str, ...] = ()
    kv_cache_dtype: str = "auto"
    """The number type that `auto` chose."""
    kv_cache_dtype_because: str = ""
    """Why it is that."""
    aliases: tuple[str, ...] = ()
    """Other names by which clients may ask for it."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What the model's generation_config sets of SamplingParams."""
    number_types: str = ""
    """Of arithmetic and weights, as in "float32, int4 and int8 weights"."""
    dtype_because: str = ""
    """Why arithmetic has that type."""
    created: int = field(default_factory=lambda: int(time.time()))

    def require(self, name: str | None) -> None:
        """Raise 404 if a client names another model; a request without a name takes this one."""
        if name is not None and name not in self.names:
            raise RequestError(
                f"this server has no model {name[:256]!r}; it serves {self.name!r}",
                param="model",
                status=404,
                code="model_not_found",
            )

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def listing(self, name: str) -> dict[str, Any]:
        """The model as /v1/models shows it under one of its names."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvweave",
            "root": self.path,
            "max_model_len": self.context_length,
        }

    def facts(self) -> dict[str, Any]:
        """The model as SGLang's /get_model_info shows it."""
        return {
            "model_path": self.path,
            "served_model_name": self.name,
            "tokenizer_path": self.tokenizer_path,
            "is_generation": True,
            "model_type": self.model_type,
            "architectures": list(self.architectures),
            "max_model_len": self.context_length,
            "vocab_size": self.vocab_size,
            "kv_cache_dtype": self.kv_cache_dtype,
            "kv_cache_dtype_because": self.kv_cache_dtype_because,
            "number_types": self.number_types,
            "dtype_because": self.dtype_because,
        }


def card_of(loaded: LoadedModel, config: ModelConfig | None = None) -> ModelCard:
    """The card of a model that was loaded as `config` says."""
    config = config or ModelConfig()
    return ModelCard(
        name=loaded.name,
        path=loaded.path,
        tokenizer_path=config.tokenizer or loaded.path,
        context_length=loaded.context_length,
        vocab_size=loaded.vocab_size,
        model_type=loaded.config.model_type,
        architectures=tuple(loaded.config.architectures or ()),
        kv_cache_dtype=str(loaded.kv_dtype).removeprefix("torch."),
        kv_cache_dtype_because=loaded.kv_dtype_because,
        aliases=config.served_names[1:],
        sampling=loaded.sampling,
        number_types=loaded.number_types,
        dtype_because=loaded.dtype_because,
    )


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts that a server needs of its engine, in whatever process that runs."""

    card: ModelCard
    tokenizer: Any
    """The model's transformers tokenizer."""
    config: EngineConfig
    """As in force: a model that fails its self-check is served exactly."""
    self_check: SelfCheck | None


def engine_info(
    loaded: LoadedModel, config: EngineConfig, self_check: SelfCheck | None
) -> EngineInfo:
    """The facts about a model that is loaded and checked."""
    card = card_of(loaded, config.model)
    return EngineInfo(card, loaded.tokenizer, config, self_check)
