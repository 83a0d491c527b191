"""The rotation of each layer's keys in a model that SGLang loaded, and moves by that rotation.

Every attention module is run alone, on one hidden state at several positions, up to the point where
it would hand keys and values to SGLang's attention. What position did to the key is the layer's
rotation, and one of the model's own tables of cosines and sines has to explain it.

A moved key is turned by the same table as SGLang's fresh keys, so both have the same error: after
1,000 positions, the float32 angles of a model's table are off by 1e-4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from kvweave.errors import UnsupportedModelError, reason
from kvweave.kv.layout import Rotary
from kvweave.kv.relocation import turned
from kvweave.models.inspect import Floats, Keys, find_rotation

_FAR = 1024
"""Last position that is tried: behind it, float32's error of the fastest pair's angle passes the
tolerance."""


class _Handed(Exception):  # noqa: N818  (no error: it ends a run early)
    """An attention module is about to attend: its key and value."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.key, self.value = key, value


class RotaryTable(NamedTuple):
    """Cosines and sines by position, of one of SGLang's rotary embeddings.

    embedding: holds them as `cos_sin_cache`, (positions, 2 * pairs); SGLang may replace that.
    backwards: the model turns its keys the other way round.
    """

    embedding: Any
    backwards: bool

    def between(
        self, sources: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, float32 (N, 1, pairs), that turn keys of `sources` to `targets`.

        sources, targets: positions, int64 (N). As complex numbers, a row of targets divided by one
        of sources: what a table rounds goes into both alike, and a scale of all keys (YaRN) is in
        both rows.
        """
        rows = self.embedding.cos_sin_cache
        there, here = (torch.complex(*rows[at].float().chunk(2, -1)) for at in (targets, sources))
        turn = (there / here)[:, None]
        return turn.real, -turn.imag if self.backwards else turn.imag


class KeyRotation(NamedTuple):
    """How one layer turns keys: which pairs, and by which table; None: not at all."""

    rotary: Rotary
    table: RotaryTable | None


class _Layer(NamedTuple):
    number: int
    attention: Any
    """RadixAttention"""
    around: torch.nn.Module
    """The module that projects, rotates, and calls it."""


def inspect_layers(
    model: torch.nn.Module,
    layers: Sequence[int],
    *,
    hidden_size: int,
    context_length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[KeyRotation, ...]:
    """The rotation of each of `layers`, the numbers of those whose KV the pool keeps.

    Raises UnsupportedModelError, as a sentence, for the first layer whose keys cannot be moved.
    """
    found = {layer.number: layer for layer in _attention_layers(model)}
    tables = _rotary_tables(model)
    hidden = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(0))
    runs = _LayerRuns(hidden.to(device, dtype), context_length)
    rotations = []
    for number in layers:
        if number not in found:
            raise UnsupportedModelError(
                f"layer {number} of this model keeps KV but has no attention that kvweave knows"
            )
        try:
            rotations.append(runs.rotation(found[number], tables))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"layer {number} of this model: its keys cannot be moved: {error}"
            ) from error
    return tuple(rotations)


class _LayerRuns:
    """Runs attention modules on the same hidden state at chosen positions."""

    def __init__(self, hidden: torch.Tensor, context_length: int) -> None:
        self._hidden = hidden
        far = max(1, min(context_length, _FAR) - 2)
        self._positions = [0, 1, far, far + 1]
        self._furthest = max(1, context_length - 1)

    def rotation(
        self, layer: _Layer, tables: Sequence[tuple[Floats, torch.nn.Module]]
    ) -> KeyRotation:
        key, value = self._run(layer, self._positions)
        beside_far, _ = self._run(layer, [0, 1, self._furthest, self._furthest])
        keys = Keys.of(key.transpose(0, 1), np.array(self._positions, np.float64))
        if not _alike(beside_far[:2], key[:2], keys.tolerance):
            raise UnsupportedModelError("their frequencies depend on the length of the prompt")
        if not _alike(value, value[:1], keys.tolerance):
            raise UnsupportedModelError("position enters values, too")
        rotary = find_rotation(keys, [frequencies for frequencies, _ in tables])
        if rotary is None:
            raise UnsupportedModelError("position enters them otherwise than by a known rotation")
        rotation = KeyRotation(rotary, _table_of(rotary, tables))
        self._check_table(rotation, key)
        return rotation

    def _check_table(self, rotation: KeyRotation, key: torch.Tensor) -> None:
        """Raise UnsupportedModelError unless the table turns `key` back to where it came from."""
        rotary, table = rotation
        if table is None:
            return
        rows = len(table.embedding.cos_sin_cache)
        if rows <= self._furthest:
            raise UnsupportedModelError(
                f"the table of their cosines and sines ends after {rows} positions, and prompts "
                f"may have {self._furthest + 1}"
            )
        positions = torch.tensor(self._positions, device=key.device)
        back = turned(key, rotary, *table.between(positions, torch.zeros_like(positions)))
        keys = Keys.of(back.transpose(0, 1), np.array(self._positions, np.float64))
        if keys.error(replace(rotary, inv_freq=0 * rotary.inv_freq)) >= keys.tolerance:
            raise UnsupportedModelError("the model's table of cosines and sines does not turn them")

    def _run(self, layer: _Layer, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value (positions, heads, dim) that the layer hands over."""
        device = self._hidden.device
        try:
            with _stopped(layer.attention), torch.inference_mode():
                layer.around(
                    positions=torch.tensor(positions, device=device),
                    hidden_states=self._hidden.repeat(len(positions), 1),
                    forward_batch=_plain_batch(),
                )
        except _Handed as handed:
            attention, rows = layer.attention, len(positions)
            heads = attention.tp_k_head_num
            return (
                handed.key.reshape(rows, heads, attention.qk_head_dim),
                handed.value.reshape(rows, heads, attention.v_head_dim),
            )
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(layer.around).__name__} cannot be run outside of a forward pass "
                f"({reason(error)})"
            ) from error
        raise UnsupportedModelError(f"{type(layer.around).__name__} does not attend when it is run")


def _alike(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Equal within `tolerance`, relative to the mean size of `one`."""
    size = other.float().abs().mean()
    return bool(((one.float() - other.float()).abs() <= tolerance * size).all())


def _plain_batch() -> Any:
    """The part of a ForwardBatch that attention modules read before they attend: a prefill."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(forward_mode=ForwardMode.EXTEND)


@contextmanager
def _stopped(attention: torch.nn.Module) -> Iterator[None]:
    """Within the block, a call of this module raises _Handed with its key and value."""

    def hand_over(q: Any, k: torch.Tensor, v: torch.Tensor, *_: Any, **extra: Any) -> None:
        if k is None or extra.get("save_kv_cache") is False or "k_rope" in extra:
            raise UnsupportedModelError("the layer writes them to the pool by itself")
        raise _Handed(k, v)

    attention.forward = hand_over
    try:
        yield
    finally:
        del attention.forward


def _attention_layers(model: torch.nn.Module) -> Iterator[_Layer]:
    from sglang.srt.layers.radix_attention import RadixAttention

    for around in model.modules():
        for attention in around.children():
            if isinstance(attention, RadixAttention):
                yield _Layer(attention.layer_id, attention, around)


def _rotary_tables(model: torch.nn.Module) -> list[tuple[Floats, torch.nn.Module]]:
    """The model's rotary embeddings of different frequencies (radians per position), with these.

    Sines and cosines at position 1 are those of the frequencies. They are computed anew in float32,
    since the model's own copy may be rounded. A constant scale (YaRN) leaves angles alone.
    """
    tables: dict[bytes, tuple[Floats, torch.nn.Module]] = {}
    for module in model.modules():
        compute = getattr(module, "_compute_cos_sin_cache", None)
        rows = getattr(module, "cos_sin_cache", None)
        if compute is None or rows is None or rows.dim() != 2:
            continue
        cosine, sine = compute()[1].double().cpu().chunk(2, dim=-1)
        frequencies = torch.atan2(sine, cosine).numpy()
        tables.setdefault(frequencies.tobytes(), (frequencies, module))
    return list(tables.values())


def _table_of(
    rotary: Rotary, tables: Sequence[tuple[Floats, torch.nn.Module]]
) -> RotaryTable | None:
    """The one that `rotary` was built on; None for keys without position."""
    for frequencies, embedding in tables:
        for backwards, sign in enumerate((1, -1)):
            if np.array_equal(rotary.inv_freq, sign * frequencies):
                return RotaryTable(embedding, bool(backwards))
    return None


_AT_ONCE = 4096
"""Tokens whose float32 copies fit into what SGLang leaves of a device's memory."""


class SlotRun(NamedTuple):
    """Tokens that follow each other, in a donor and in a recipient.

    sources, targets: their slots, int64 (N), on the pool's device. donor_start, start: the first
    one's position in each.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    donor_start: int
    start: int


class PoolMover:
    """Moves KV within an MHATokenToKVPool.

    With the overlap scheduler, forward passes run on a stream of their own, behind the one on which
    requests are admitted. The copy belongs on that stream: there, it comes after the pass that may
    still be writing the donor's KV (or the slots' former owner's), and before the one that reads
    the copy. Without it, everything is on the current stream.
    """

    def __init__(self, pool: Any, rotations: Sequence[KeyRotation], stream: Any | None) -> None:
        self._pool = pool
        self._rotations = tuple(rotations)
        self._device = torch.device(pool.device)
        self._stream = None if self._device.type == "cpu" else stream  # CPUs have no streams

    def move(self, runs: Sequence[SlotRun]) -> None:
        """Copy every run's values, and its keys turned to their positions, in every layer."""
        with self._ordered(runs), torch.inference_mode():
            every = (
                torch.cat([run.sources for run in runs]),
                torch.cat([run.targets for run in runs]),
                torch.cat([self._positions(run.donor_start, run) for run in runs]),
                torch.cat([self._positions(run.start, run) for run in runs]),
            )
            for piece in zip(*(torch.split(of, _AT_ONCE) for of in every), strict=True):
                self._move(*piece)

    def _positions(self, start: int, run: SlotRun) -> torch.Tensor:
        return torch.arange(start, start + len(run.sources), device=self._device)

    def _move(
        self,
        sources: torch.Tensor,
        targets: torch.Tensor,
        donor_positions: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        tables = {rotation.table for rotation in self._rotations if rotation.table is not None}
        turns = {table: table.between(donor_positions, positions) for table in tables}
        for number, (rotary, table) in enumerate(self._rotations, self._pool.start_layer):
            keys = self._pool.get_key_buffer(number)
            values = self._pool.get_value_buffer(number)
            values[targets] = values[sources]
            lent = keys[sources]
            keys[targets] = lent if table is None else turned(lent, rotary, *turns[table])

    def _ordered(self, runs: Sequence[SlotRun]) -> Any:
        if self._stream is None:
            return nullcontext()
        device = torch.get_device_module(self._device)
        self._stream.wait_stream(device.current_stream())  # the slots' numbers come from there
        for run in runs:  # their memory must not be reused before the copy has read them
            run.sources.record_stream(self._stream)
            run.targets.record_stream(self._stream)
        return device.stream(self._stream)
