"""Relocation of KV: copies values, and copies keys rotated to their new positions.

A rotary key at position p is the unrotated key turned by p times its frequencies. The key at q is
the key at p turned by q - p more: rotations add up (RoFormer, arXiv 2104.09864, section 3).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvweave import kernels
from kvweave.errors import IntegrityError, UnsupportedModelError
from kvweave.kv.layout import Rotary
from kvweave.kv.pool import IntArray
from kvweave.kv.tensors import KVTensors


def turn(rotary: Rotary, delta: int) -> npt.NDArray[np.float32]:
    """Factors that turn a key by `delta` positions: (2, turned), turned = 2 * len(inv_freq).

    Element x of a key's rotated part becomes x * factors[0] + partner(x) * factors[1]; the partner
    is the other element of its pair.
    """
    cosine, sine = _cosine_and_sine(rotary, delta)
    if rotary.interleaved:
        return np.stack([np.repeat(cosine, 2), np.stack([-sine, sine], 1).ravel()])
    return np.stack([np.tile(cosine, 2), np.concatenate([-sine, sine])])


def relocate(keys: torch.Tensor, rotary: Rotary, delta: int) -> torch.Tensor:
    """`keys` (..., key_dim) of any positions, each `delta` positions further on. A new tensor."""
    cosine, sine = (torch.from_numpy(at).to(keys.device) for at in _cosine_and_sine(rotary, delta))
    return turned(keys, rotary, cosine, sine)


def turned(
    keys: torch.Tensor, rotary: Rotary, cosine: torch.Tensor, sine: torch.Tensor
) -> torch.Tensor:
    """`keys` (..., key_dim), each pair turned by an angle of its own. A new tensor.

    cosine, sine: float32 (..., pairs), of these angles; they broadcast. Computed in float32,
    rounded once to the keys' own type.
    """
    pairs, start = len(rotary.inv_freq), rotary.offset
    stop = start + 2 * pairs
    if rotary.interleaved:
        halves = slice(start, stop, 2), slice(start + 1, stop, 2)
    else:
        halves = slice(start, start + pairs), slice(start + pairs, stop)
    first, second = (keys[..., half].float() for half in halves)
    moved = keys.clone()
    moved[..., halves[0]] = (first * cosine - second * sine).to(keys.dtype)
    moved[..., halves[1]] = (second * cosine + first * sine).to(keys.dtype)
    return moved


def _cosine_and_sine(
    rotary: Rotary, delta: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Of each pair's angle, which is worked out in float64.

    After a million positions at the highest frequency, a float32 knows an angle to a sixteenth of a
    radian only.
    """
    angles = delta * rotary.inv_freq.astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class MoveRun:
    """Tokens that all move by the same distance.

    sources, targets: int32 (N), slots; no slot is both. `delta`: target position - donor position.
    Layers in `zeroed` get zeros instead of the donor's KV: for ablation only, since zeroed keys
    still take their share of softmax and give no value.
    """

    sources: IntArray
    targets: IntArray
    delta: int
    zeroed: frozenset[int] = frozenset()


class KVMover(Protocol):
    """Fills recipients' slots with moved KV."""

    @property
    def fixed_because(self) -> str | None:
        """Why this model's KV cannot be moved, as a sentence; None if it can."""

    def move(self, runs: Sequence[MoveRun]) -> None:
        """Copy every run's KV from its sources to its targets, keys turned by its delta."""


class TensorMover:
    """Moves KV within one pool of tensors; compiled on CPUs, plain torch elsewhere.

    `native` False forgoes the compiled kernel; `level` chooses one of its instruction sets.
    """

    def __init__(self, kv: KVTensors, *, native: bool = True, level: int | None = None) -> None:
        self._kv = kv
        usable = native and kv.device.type == "cpu" and kv.dtype in kernels.NUMBER_TYPES
        self._library = kernels.load() if usable else None
        self._level = level
        self._is_source = np.zeros(kv.num_slots, np.bool_)

    @property
    def fixed_because(self) -> str | None:
        """See KVMover."""
        for number, layout in enumerate(self._kv.layouts):
            if layout.rotary is None:
                why = layout.fixed_because or "they carry position in a way that is not known"
                return f"layer {number} of this model: its keys cannot be moved: {why}"
        return None

    def move(self, runs: Sequence[MoveRun]) -> None:
        """See KVMover. UnsupportedModelError if it cannot, IntegrityError for unfit slots."""
        if self.fixed_because is not None:
            raise UnsupportedModelError(self.fixed_because)
        runs = [run for run in runs if len(run.sources)]
        if not runs:
            return
        self._check(runs, *_slots(runs))
        for zeroed in {run.zeroed for run in runs}:
            some = [run for run in runs if run.zeroed == zeroed]
            if self._library is not None:
                self._move_native(self._library, some, zeroed)
            else:
                self._move_plain(some, zeroed)

    def _check(self, runs: Sequence[MoveRun], sources: IntArray, targets: IntArray) -> None:
        for run in runs:
            if len(run.sources) != len(run.targets):
                raise IntegrityError(
                    f"{len(run.sources)} slots cannot move to {len(run.targets)} slots"
                )
        for slots in (sources, targets):
            if int(slots.min()) < 0 or int(slots.max()) >= self._kv.num_slots:
                raise IntegrityError("a move names a slot that the pool does not have")
        self._is_source[sources] = True
        overlap = bool(self._is_source[targets].any())
        self._is_source[sources] = False
        if overlap:
            raise IntegrityError("a move would overwrite a slot that it still reads")

    def _move_plain(self, runs: Sequence[MoveRun], zeroed: frozenset[int]) -> None:
        sources, targets = _slots(runs)
        device = self._kv.device
        read = torch.from_numpy(sources).long().to(device)
        write = torch.from_numpy(targets).long().to(device)
        ends = np.cumsum([len(run.sources) for run in runs]).tolist()
        for number, layout in enumerate(self._kv.layouts):
            unturned = self._kv.unturned(number)
            if number in zeroed:
                for tensor in (self._kv.keys[number], *unturned):
                    tensor[write] = 0
                continue
            assert layout.rotary is not None  # else `fixed_because`
            for tensor in self._kv.unturned(number):
                tensor[write] = tensor[read]
            for run, end in zip(runs, ends, strict=True):
                some = slice(end - len(run.sources), end)
                keys = self._kv.read_keys(number, read[some])
                turned = relocate(keys, layout.rotary, run.delta)
                self._kv.write_keys(number, write[some], turned)

    def _move_native(
        self, library: kernels.Library, runs: Sequence[MoveRun], zeroed: frozenset[int]
    ) -> None:
        kv = self._kv
        sources, targets = _slots(runs)
        starts = np.cumsum([0, *(len(run.sources) for run in runs)], dtype=np.int64)
        layers = (kernels.MoveLayer * len(kv.layouts))()
        turns: dict[Any, npt.NDArray[np.float32]] = {}  # layers mostly share their frequencies
        for number, layout in enumerate(kv.layouts):
            rotary = layout.rotary
            assert rotary is not None  # else `fixed_because`
            kind = (rotary.inv_freq.tobytes(), rotary.interleaved)
            if kind not in turns:
                turns[kind] = np.stack([turn(rotary, run.delta) for run in runs])
            layers[number] = kernels.MoveLayer(
                keys=kv.keys[number].data_ptr(),
                values=kv.values[number].data_ptr(),
                key_scales=kv.key_scales[number].data_ptr() if kv.key_scales else None,
                value_scales=kv.value_scales[number].data_ptr() if kv.value_scales else None,
                heads=layout.num_kv_heads,
                key_dim=layout.key_dim,
                value_dim=layout.value_dim,
                offset=rotary.offset,
                turned=2 * len(rotary.inv_freq),
                turns=turns[kind].ctypes.data,
                interleaved=rotary.interleaved,
                zeroed=number in zeroed,
            )
        call = kernels.MoveCall(
            layers=len(layers),
            runs=len(runs),
            layer=ctypes.addressof(layers),
            run_start=starts.ctypes.data,
            sources=sources.ctypes.data,
            targets=targets.ctypes.data,
            type=kernels.NUMBER_TYPES[kv.dtype],
            threads=torch.get_num_threads(),
            level=library.level if self._level is None else self._level,
        )
        library.move(ctypes.byref(call))


def _slots(runs: Sequence[MoveRun]) -> tuple[IntArray, IntArray]:
    """The sources and the targets of all runs, one after another."""
    return (
        np.concatenate([run.sources for run in runs]).astype(np.int32, copy=False),
        np.concatenate([run.targets for run in runs]).astype(np.int32, copy=False),
    )
