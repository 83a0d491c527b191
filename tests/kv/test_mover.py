"""Moving runs of KV between slots: every layer, compiled and in plain torch alike."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvweave import kernels
from kvweave.errors import IntegrityError, UnsupportedModelError
from kvweave.kv.layout import LayerLayout, Rotary
from kvweave.kv.relocation import MoveRun, TensorMover, relocate
from kvweave.kv.tensors import KVTensors


def frequencies(pairs: int, base: float = 10_000.0) -> np.ndarray:
    return base ** -(np.arange(pairs) / pairs)


LAYOUTS = (
    LayerLayout(3, 64, 64, rotary=Rotary(frequencies(32))),
    LayerLayout(2, 64, 64, rotary=Rotary(frequencies(32), interleaved=True)),
    LayerLayout(1, 24, 40, rotary=Rotary(frequencies(5), offset=3)),
    LayerLayout(2, 24, 9, rotary=Rotary(frequencies(5), interleaved=True, offset=7)),
    LayerLayout(2, 32, 32, rotary=Rotary(frequencies(8, 1e6), offset=16)),
    LayerLayout(2, 16, 16, rotary=Rotary(np.zeros(0))),
)
PAGES, PAGE_SIZE = 60, 16


def filled(dtype: torch.dtype) -> KVTensors:
    kv = KVTensors(LAYOUTS, PAGES, PAGE_SIZE, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    slots = torch.arange(kv.num_slots)
    for layer, pools in enumerate(zip(kv.keys, kv.values, strict=True)):
        kv.write(layer, slots, *(torch.randn(each.shape, generator=generator) for each in pools))
    return kv


def movers(
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[KVTensors, TensorMover]]:
    """The kernel in each instruction set of this processor, and plain torch; each with a pool."""
    library = kernels.load()
    assert library is not None, "the kernels were not built, so they cannot be tested"
    for level in range(library.level + 1):
        kv = filled(dtype)
        yield kv, TensorMover(kv, level=level)
    kv = filled(dtype)
    yield kv, TensorMover(kv, native=False)


def draw_runs(seed: int) -> list[MoveRun]:
    """Runs of any length; their sources, their targets, both or neither are scattered slots."""
    rng = random.Random(seed)
    slots = list(range(PAGES * PAGE_SIZE))
    givers, takers = slots[: len(slots) // 2], slots[len(slots) // 2 :]
    for some, scattered in ((givers, seed & 1), (takers, seed & 2)):
        if scattered:
            rng.shuffle(some)
    runs = []
    for _ in range(rng.randint(1, 4)):
        count = rng.choice([0, 1, 2, 15, 100])
        sources, givers = givers[:count], givers[count:]
        targets, takers = takers[:count], takers[count:]
        runs.append(
            MoveRun(
                np.array(sources, np.int32), np.array(targets, np.int32), rng.randint(-9_000, 9_000)
            )
        )
    return runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_every_layer_of_every_run_is_moved_and_nothing_else(seed: int, dtype: torch.dtype) -> None:
    runs, before = draw_runs(seed), filled(dtype)
    right = filled(dtype)
    for run in runs:
        source, target = torch.from_numpy(run.sources).long(), torch.from_numpy(run.targets).long()
        for layer, layout in enumerate(LAYOUTS):
            assert layout.rotary is not None
            moved = relocate(before.keys[layer][source], layout.rotary, run.delta)
            right.keys[layer][target] = moved
            right.values[layer][target] = before.values[layer][source]
    close = {"atol": 1e-6, "rtol": 1e-6 if dtype == torch.float32 else 2**-7}
    for kv, mover in movers(dtype):
        mover.move(runs)
        for got, want in zip(kv.values, right.values, strict=True):
            assert torch.equal(got, want)
        for got, want in zip(kv.keys, right.keys, strict=True):
            torch.testing.assert_close(got, want, **close)
            if dtype == torch.bfloat16:  # only what lies between two may be rounded otherwise
                assert (got != want).float().mean() < 0.002


@pytest.mark.parametrize("seed", range(8))
def test_int8_keys_are_turned_once_and_rounded_once(seed: int) -> None:
    runs, before = draw_runs(seed), filled(torch.int8)
    every = torch.arange(before.num_slots)
    touched = torch.zeros(before.num_slots, dtype=torch.bool)
    for run in runs:
        touched[torch.from_numpy(run.targets).long()] = True
    for kv, mover in movers(torch.int8):
        mover.move(runs)
        for layer, layout in enumerate(LAYOUTS):
            assert layout.rotary is not None
            keys, values = before.read_keys(layer, every), before.read_values(layer, every)
            for run in runs:
                source, target = (torch.from_numpy(at).long() for at in (run.sources, run.targets))
                keys[target] = relocate(keys[source], layout.rotary, run.delta)
                values[target] = values[source]
            assert torch.equal(kv.read_values(layer, every), values)
            got = kv.read_keys(layer, every)
            assert torch.equal(got[~touched], keys[~touched])
            step = keys.abs().amax(-1, keepdim=True) / 127
            assert bool(((got - keys).abs() <= 0.501 * step).all())


def test_a_thousand_shifts_of_one_donor_do_not_degrade() -> None:
    """Each is one rotation from the exact donor: the thousandth is as good as the first."""
    source, target = np.arange(20, dtype=np.int32), np.arange(100, 120, dtype=np.int32)
    donor = filled(torch.float32).keys[0][:20].double()
    angles = torch.from_numpy(frequencies(32))
    for kv, mover in movers():
        for delta in range(1, 1001):
            mover.move([MoveRun(source, target, delta)])
        half = (donor[..., :32] + 1j * donor[..., 32:]) * torch.exp(1j * 1000 * angles)
        right = torch.cat([half.real, half.imag], -1)
        torch.testing.assert_close(kv.keys[0][100:120].double(), right, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_zeroed_layers_hold_zeros_and_the_others_the_donor(dtype: torch.dtype) -> None:
    for kv, mover in movers(dtype):
        for tensor in (*kv.keys, *kv.values, *kv.key_scales, *kv.value_scales):
            tensor[50:60] = 1
        run = MoveRun(
            np.arange(10, dtype=np.int32), np.arange(50, 60, dtype=np.int32), 8, frozenset({1, 3})
        )
        other = MoveRun(np.arange(10, 20, dtype=np.int32), np.arange(60, 70, dtype=np.int32), 8)
        mover.move([run, other])
        assert torch.equal(kv.values[1][60:70], kv.values[1][10:20])
        for layer in range(len(LAYOUTS)):
            zero = layer in (1, 3)
            assert bool((kv.keys[layer][50:60] == 0).all()) is zero
            assert bool((kv.values[layer][50:60] == 0).all()) is zero
            assert torch.equal(kv.values[layer][50:60], kv.values[layer][:10]) is not zero


def test_models_whose_keys_are_fixed_are_refused_in_words() -> None:
    fixed = LayerLayout(1, 8, 8, fixed_because="its positions are learned")
    kv = KVTensors([LAYOUTS[0], fixed], 4, 4)
    mover = TensorMover(kv)
    words = "layer 1 of this model: its keys cannot be moved: its positions are learned"
    assert mover.fixed_because == words
    run = MoveRun(np.zeros(1, np.int32), np.ones(1, np.int32), 1)
    with pytest.raises(UnsupportedModelError, match=words):
        mover.move([run])
    assert TensorMover(KVTensors(LAYOUTS, 4, 4)).fixed_because is None


@pytest.mark.parametrize(
    ("sources", "targets", "words"),
    [
        ([0, 1], [1, 2], "overwrite"),
        ([0, 1], [5], "2 slots cannot move to 1"),
        ([0], [PAGES * PAGE_SIZE], "does not have"),
        ([-1], [3], "does not have"),
    ],
)
def test_unfit_slots_move_nothing(sources: list[int], targets: list[int], words: str) -> None:
    run = MoveRun(np.array(sources, np.int32), np.array(targets, np.int32), 1)
    for kv, mover in movers():
        with pytest.raises(IntegrityError, match=words):
            mover.move([run])
        # What failed leaves nothing behind that a later move would stumble over.
        mover.move([MoveRun(np.array([2], np.int32), np.array([0], np.int32), 1)])
        assert torch.equal(kv.values[0][1:], filled(torch.float32).values[0][1:])
