"""The bytes of an event batch: msgpack, `[time, [events], rank]`.

Today's vLLM and SGLang write an event as a map with its `type`; until 2026 they wrote an array,
`type` first, then the fields in the order below. Readers skip keys that they do not know, so one
map serves both. Hashes are unsigned 64-bit integers, as vLLM's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from kvweave.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

_ORDER = ("block_hashes", "parent_block_hash", "token_ids", "block_size")
"""Of the fields that are read."""


class Batch(NamedTuple):
    """What one step of an engine changed, and when, in seconds since 1970."""

    time: float
    events: list[KVEvent]


def encode_batch(events: Sequence[KVEvent], time: float, form: str = "map") -> bytes:
    """One message's payload; `form` is EventsConfig's `format`.

    A salt that a program gives may be half a surrogate pair. UTF-8 has none, so its escape is said.
    """
    write = _as_map if form == "map" else _as_array
    said = [time, [write(event) for event in events], 0]
    data: bytes = msgpack.packb(said, unicode_errors="backslashreplace")
    return data


def decode_batch(payload: bytes) -> Batch:
    """A payload in either form, kvweave's or another engine's; ValueError if it is broken.

    What is neither stored, removed nor cleared is skipped.
    """
    try:
        time, events, *_ = msgpack.unpackb(payload)
        return Batch(time, [event for event in map(_read, events) if event is not None])
    except (TypeError, KeyError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"this is no batch of KV events: {error!r}") from None


def _fields(event: KVEvent) -> dict[str, Any]:
    """Name and value in vLLM's order. An absent adapter is said as null: vLLM wants the keys."""
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
    said = {"type": type(event).__name__, **_fields(event)}
    if isinstance(event, BlockStored) and event.salt is not None:
        said["cache_salt"] = event.salt  # as SGLang says it; and as vLLM does, with first blocks
        if event.parent_block_hash is None:
            said["extra_keys"] = [[event.salt], *[None] * (len(event.block_hashes) - 1)]
    return said


def _as_array(event: KVEvent) -> list[Any]:
    return [type(event).__name__, *_fields(event).values()]


def _read(said: Any) -> KVEvent | None:
    if isinstance(said, dict):
        kind = said["type"]
    else:
        kind, *values = said
        said = dict(zip(_ORDER, values, strict=False))
    if kind == "BlockStored":
        return BlockStored(
            tuple(said["block_hashes"]),
            said["parent_block_hash"],
            tuple(said["token_ids"]),
            said["block_size"],
            said.get("cache_salt"),
        )
    if kind == "BlockRemoved":
        return BlockRemoved(tuple(said["block_hashes"]))
    return AllBlocksCleared() if kind == "AllBlocksCleared" else None
