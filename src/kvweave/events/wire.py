"""Encodes and decodes event batches: msgpack, `[time, [events], rank]`.

Today's vLLM and SGLang write an event as a map with its `type`; until 2026 they wrote an array,
`type` first, then the fields in the order below. Readers skip unknown keys, so one map serves both.
Hashes are unsigned 64-bit integers, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from kvweave.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

_ORDER = ("block_hashes", "parent_block_hash", "token_ids", "block_size")
"""Order of the fields that readers use."""


class Batch(NamedTuple):
    """Changes of one engine step, and their time in seconds since 1970."""

    time: float
    events: list[KVEvent]


def encode_batch(events: Sequence[KVEvent], time: float, form: str = "map") -> bytes:
    """One message's payload; `form` is EventsConfig's `format`.

    A salt may contain half a surrogate pair, which UTF-8 cannot encode; its escape is written.
    """
    write = _as_map if form == "map" else _as_array
    content = [time, [write(event) for event in events], 0]
    data: bytes = msgpack.packb(content, unicode_errors="backslashreplace")
    return data


def decode_batch(payload: bytes) -> Batch:
    """A payload in either form, kvweave's or another engine's; ValueError if it is broken.

    Events of other types are skipped.
    """
    try:
        time, events, *_ = msgpack.unpackb(payload)
        return Batch(time, [event for event in map(_read, events) if event is not None])
    except (TypeError, KeyError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"this is no batch of KV events: {error!r}") from None


def _fields(event: KVEvent) -> dict[str, Any]:
    """Name and value in vLLM's order. An absent adapter is null: vLLM requires the keys."""
    if isinstance(event, BlockStored):
        return {
            "block_hashes": event.block_hashes,
            "parent_block_hash": event.parent_block_hash,
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": None,
            "medium": None,
            "lora_name": None,
        }
    if isinstance(event, BlockRemoved):
        return {"block_hashes": event.block_hashes, "medium": None}
    return {}


def _as_map(event: KVEvent) -> dict[str, Any]:
    content = {"type": type(event).__name__, **_fields(event)}
    if isinstance(event, BlockStored) and event.salt is not None:
        content["cache_salt"] = event.salt  # SGLang's key; vLLM's, for first blocks, follows
        if event.parent_block_hash is None:
            content["extra_keys"] = [[event.salt], *[None] * (len(event.block_hashes) - 1)]
    return content


def _as_array(event: KVEvent) -> list[Any]:
    return [type(event).__name__, *_fields(event).values()]


def _read(content: Any) -> KVEvent | None:
    if isinstance(content, dict):
        kind = content["type"]
    else:
        kind, *values = content
        content = dict(zip(_ORDER, values, strict=False))
    if kind == "BlockStored":
        return BlockStored(
            tuple(content["block_hashes"]),
            content["parent_block_hash"],
            tuple(content["token_ids"]),
            content["block_size"],
            content.get("cache_salt"),
        )
    if kind == "BlockRemoved":
        return BlockRemoved(tuple(content["block_hashes"]))
    return AllBlocksCleared() if kind == "AllBlocksCleared" else None
