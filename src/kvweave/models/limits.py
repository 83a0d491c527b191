"""What a model's configuration says before any weight is loaded: served or not, and how far."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from kvweave.errors import ConfigError, UnsupportedModelError

_log = logging.getLogger(__name__)


def check_settings(settings: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError, as a sentence's end about the model, for what never works."""
    if settings.is_encoder_decoder:
        raise UnsupportedModelError("it is an encoder-decoder; kvweave serves decoders only")
    for rope in _rope_settings(settings):
        if "dynamic" in rope["rope_type"]:
            raise UnsupportedModelError(
                "its rotary frequencies change with the longest prompt computed so far (dynamic "
                "NTK scaling), so that one request's KV would depend on another's"
            )


def context_length_of(settings: PreTrainedConfig, wanted: int | None) -> int:
    """Longest prompt plus output: the model's own, or `wanted` if that is not more.

    Raises ConfigError if it is, UnsupportedModelError if neither is known.
    """
    own = _own_context_length(settings)
    if wanted is None:
        if own is None:
            raise UnsupportedModelError(
                "its configuration has no max_position_embeddings: say with --context-length how "
                "long a prompt and its output may be"
            )
        return own
    if own is not None and wanted > own:
        raise ConfigError(
            [f"--context-length {wanted} is more than this model's {own} tokens; lower or drop it"]
        )
    return wanted


def _own_context_length(settings: PreTrainedConfig) -> int | None:
    text = settings.get_text_config()
    own: int | None = getattr(text, "max_position_embeddings", None)
    if own is None:
        return None
    for rope in _rope_settings(settings):
        before = rope.get("original_max_position_embeddings")
        if before is None:
            continue
        if rope["rope_type"] == "longrope" and before < own:
            # Past this length the model turns all positions faster or slower, earlier ones too.
            _log.info(
                "context capped at %d tokens (the model's own is %d): beyond, its rotary "
                "frequencies change for the whole prompt, and no cached KV would be right",
                before,
                own,
            )
            own = before
        elif rope["rope_type"] == "yarn":
            # Some configurations state the length before scaling, some the one after.
            own = max(own, int(before * rope.get("factor", 1.0)))
    return own


def _rope_settings(settings: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Rotary settings, one per kind of layer where the model has several."""
    rope = getattr(settings.get_text_config(), "rope_parameters", None) or {}
    if "rope_type" in rope:
        yield rope
    else:
        yield from (some for some in rope.values() if isinstance(some, Mapping) and some)
