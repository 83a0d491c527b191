"""What the server knows and tells about the one model that it serves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvweave.errors import RequestError

if TYPE_CHECKING:
    from kvweave.config import EngineConfig
    from kvweave.engine.selfcheck.gate import SelfCheck
    from kvweave.models import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """EngineInfo of the served model. `context_length` counts prompt and output tokens together."""

    name: str
    path: str
    tokenizer_path: str
    context_length: int
    vocab_size: int
    model_type: str | None = None
    architectures: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    def require(self, name: str | None) -> None:
        """Raise 404 when a client wants another model; a request without a name takes this one."""
        if name is not None and name != self.name:
            raise RequestError(
                f"this server has no model {name[:256]!r}; it serves {self.name!r}",
                param="model",
                status=404,
                code="model_not_found",
            )

    def listing(self) -> dict[str, Any]:
        """The model as /v1/models shows it."""
        return {
            "id": self.name,
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
        }


def card_of(loaded: LoadedModel, tokenizer_path: str | None = None) -> ModelCard:
    """The card of a loaded model."""
    return ModelCard(
        name=loaded.name,
        path=loaded.path,
        tokenizer_path=tokenizer_path or loaded.path,
        context_length=loaded.context_length,
        vocab_size=loaded.vocab_size,
        model_type=loaded.config.model_type,
        architectures=tuple(loaded.config.architectures or ()),
    )


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a server must know of its engine, wherever that runs."""

    card: ModelCard
    tokenizer: Any
    """The model's transformers tokenizer."""
    config: EngineConfig
    """As in force: a model that fails its self-check is served exactly."""
    self_check: SelfCheck | None


def engine_info(
    loaded: LoadedModel, config: EngineConfig, self_check: SelfCheck | None
) -> EngineInfo:
    """What is known once a model is loaded and checked."""
    card = card_of(loaded, config.model.tokenizer)
    return EngineInfo(card, loaded.tokenizer, config, self_check)
