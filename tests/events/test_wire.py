"""Encoded batches, decoded by another library with the structs of vLLM and SGLang."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvweave.events.publisher import decode_batch, encode_batch
from kvweave.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored

EVENTS = [
    BlockStored((2**64 - 1, 3), None, (5, 6, 7, 8), 2, None),
    BlockStored((9,), 3, (1, 2), 2, "tenant"),
    BlockStored((10, 11), None, (1, 2, 3, 4), 2, ""),
    BlockRemoved((3, 9)),
    AllBlocksCleared(),
]


LATER = {  # what follows the five fields that all have; without a default, a field must be there
    "vllm": [
        ("medium", str | None),
        ("lora_name", str | None),
        ("extra_keys", list[tuple[Any, ...] | None] | None, None),
    ],
    "sglang": [
        ("medium", str | None, None),
        ("cache_salt", str | None, None),
        ("session_id", str | None, None),
        ("lora_name", str | None, None),
    ],
}


def declared(engine: str, array: bool) -> Any:
    """The type of an engine's event batches; `array` for those of before 2026."""

    def event(name: str, *fields: Any) -> Any:
        return msgspec.defstruct(name, fields, array_like=array, omit_defaults=True, tag=name)

    stored = event(
        "BlockStored",
        ("block_hashes", list[int]),
        ("parent_block_hash", int | None),
        ("token_ids", list[int]),
        ("block_size", int),
        ("lora_id", int | None),
        *LATER[engine],
    )
    removed = event("BlockRemoved", ("block_hashes", list[int]), LATER[engine][0])
    events = list[stored | removed | event("AllBlocksCleared")]  # type: ignore[valid-type]
    fields = [("ts", float), ("events", events), ("rank", int | None, None)]
    return msgspec.defstruct("EventBatch", fields, array_like=True)


@pytest.mark.parametrize(
    ("form", "engine"), [("map", "vllm"), ("map", "sglang"), ("array", "vllm")]
)
def test_the_structs_of_vllm_and_sglang_read_what_is_written(form, engine):
    kind = declared(engine, form == "array")
    batch = msgspec.msgpack.decode(encode_batch(EVENTS, 12.5, form), type=kind)
    assert (batch.ts, batch.rank) == (12.5, 0)
    first, second, third, removed, cleared = batch.events
    assert first.block_hashes == [2**64 - 1, 3]
    assert (first.parent_block_hash, second.parent_block_hash) == (None, 3)
    assert (first.token_ids, first.block_size) == ([5, 6, 7, 8], 2)
    assert (first.lora_id, first.medium, first.lora_name) == (None, None, None)
    assert removed.block_hashes == [3, 9]
    assert type(cleared).__name__ == "AllBlocksCleared"
    if engine == "sglang":
        assert [each.cache_salt for each in (first, second, third)] == [None, "tenant", ""]
    elif form == "map":  # vLLM says a salt with the block that begins a prompt
        assert [each.extra_keys for each in (first, second, third)] == [None, None, [("",), None]]


def test_a_map_names_its_fields_in_the_order_of_the_structs():
    _, (first, *_), _ = msgspec.msgpack.decode(encode_batch(EVENTS, 0.0))
    assert list(first) == [
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name"),
    ]
    _, (first, *_), _ = msgspec.msgpack.decode(encode_batch(EVENTS, 0.0, "array"))
    assert first == ["BlockStored", [2**64 - 1, 3], None, [5, 6, 7, 8], 2, None, None, None]


@pytest.mark.parametrize("form", ["map", "array"])
def test_batches_round_trip(form):
    batch = decode_batch(encode_batch(EVENTS, 12.5, form))
    salts = form == "map"  # an array has no place for them
    assert batch.time == 12.5
    assert batch.events[3:] == EVENTS[3:]
    assert [event.salt for event in batch.events[:3]] == (
        [None, "tenant", ""] if salts else [None] * 3
    )


def test_other_events_are_skipped_and_broken_batches_refused():
    other = msgspec.msgpack.encode([1.0, [{"type": "BlockMigrated", "to": 3}, ["Strange"]], 0])
    assert decode_batch(other).events == []
    for broken in (
        b"",
        b"\xc1",
        b"\x93",
        msgspec.msgpack.encode({"ts": 1}),
        encode_batch(EVENTS, 1.0)[:-9],
    ):
        with pytest.raises(ValueError, match="no batch of KV events"):
            decode_batch(broken)
    with pytest.raises(ValueError, match="no batch of KV events"):
        decode_batch(msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}], 0]))
