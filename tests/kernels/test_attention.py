"""Every way to compute attention agrees with attention worked out in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvweave import kernels
from kvweave.engine.attention import AttentionBackend, LayerCall, get_backend
from kvweave.engine.attention.base import AttentionBatch
from kvweave.engine.attention.cpu import CpuAttention
from kvweave.engine.attention.sdpa import GatheredAttention
from kvweave.errors import ConfigError
from kvweave.kv.layout import LayerLayout, Rotary
from kvweave.kv.tensors import KVTensors
from support.attention_batches import expected, make_batch, make_kv, shared

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
KV_TYPES = tuple(kernels.NUMBER_TYPES)


def implementations() -> Iterator[AttentionBackend]:
    """The kernel in each instruction set that this processor has, and plain torch in both ways."""
    library = kernels.load()
    assert library is not None, "the kernels were not built, so they cannot be tested"
    for level in range(library.level + 1):
        yield CpuAttention(level=level)
    yield CpuAttention(native=False)
    yield GatheredAttention(together=True)


def draw_rows(rng: random.Random) -> list[list[int]]:
    """Prefill chunks, appends, decodes and irregular positions, from nothing to past a split."""
    rows = []
    for _ in range(rng.randint(1, 5)):
        length = rng.choice([1, 2, 17, 64, 65, 200, 513, 700, 1100])
        kind = rng.choice(["decode", "append", "chunk", "irregular", "none"])
        start = {"decode": length - 1, "append": max(0, length - 5), "chunk": length // 2}
        if kind == "irregular":
            rows.append(sorted(rng.sample(range(length), min(length, rng.randint(1, 40)))))
        else:
            rows.append(list(range(start.get(kind, length), length)))
    return rows


@pytest.mark.parametrize("kv_dtype", KV_TYPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4, 7])
    key_dim, value_dim = rng.choice([(64, 64), (128, 128), (80, 80), (24, 40), (20, 9), (96, 32)])
    window = rng.choice([None, None, 1, 30, 512, 600])
    batch = make_batch(draw_rows(rng), rng.choice([1, 4, 16, 128]), generator)
    layout = LayerLayout(kv_heads, key_dim, value_dim, window=window)
    kv = make_kv(batch, layout, kv_dtype, generator)
    shape = (batch.tokens, kv_heads * group, key_dim)
    query = torch.randn(shape, generator=generator).to(dtype)
    sinks = rng.choice([None, torch.randn(shape[1], generator=generator) * 4])
    call = LayerCall(0, key_dim**-0.5, window, rng.choice([None, None, 2.0]), sinks)
    right = expected(batch, query, kv, call)
    # Queries are rounded to 16 bits for products with int8.
    tolerance = max(TOLERANCE[dtype], 1e-4 if kv_dtype == torch.int8 else 0)
    for backend in implementations():
        backend.begin(batch)
        got = backend.attend(query, kv, call)
        assert got.dtype == dtype
        if _rounds_to_bfloat16(backend, kv):
            _check_rounded(got, batch, query, kv, call, tolerance)
        else:
            torch.testing.assert_close(got.double(), right, atol=tolerance, rtol=tolerance)


def _rounds_to_bfloat16(backend: AttentionBackend, kv: KVTensors) -> bool:
    """Whether the kernel has products of two bfloat16 numbers, and uses them for this pool."""
    level = backend._call.level if isinstance(backend, CpuAttention) else 0
    key_dim, value_dim = kv.layouts[0].key_dim, kv.layouts[0].value_dim
    return level == 3 and kv.dtype == torch.bfloat16 and key_dim % 32 == 0 and value_dim % 16 == 0


def _check_rounded(
    got: torch.Tensor,
    batch: AttentionBatch,
    query: torch.Tensor,
    kv: KVTensors,
    call: LayerCall,
    tolerance: float,
) -> None:
    """Queries are rounded as the kernel rounds them; a weight may be off by a share of 2^-8."""
    factor = torch.tensor(call.scale) * (1 if call.softcap else torch.tensor(1.4426950408889634))
    rounded = (query.float() * factor).bfloat16().double() / factor.double()
    right = expected(batch, rounded, kv, call)
    sizes = KVTensors(kv.layouts, kv.num_slots // kv.page_size, kv.page_size, dtype=kv.dtype)
    sizes.keys[0].copy_(kv.keys[0])
    sizes.values[0].copy_(kv.values[0].abs())
    bound = expected(batch, rounded, sizes, call) / 2**8 + tolerance * (1 + right.abs())
    assert ((got.double() - right).abs() <= bound).all()


ROTATIONS = (
    Rotary(10_000.0 ** -(np.arange(32) / 32)),
    Rotary(10_000.0 ** -(np.arange(32) / 32), interleaved=True),
    Rotary(10_000.0 ** -(np.arange(10) / 10), offset=24),
    Rotary(10_000.0 ** -(np.arange(5) / 5), interleaved=True, offset=7),
)


@pytest.mark.parametrize("seed", range(16))
def test_keys_used_where_the_donor_has_them_score_as_if_they_had_been_turned(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, group = rng.choice([1, 2]), rng.choice([1, 3, 7])
    window = rng.choice([None, None, 30, 600])
    batch = make_batch(draw_rows(rng), rng.choice([1, 4, 16, 128]), generator)
    layout = LayerLayout(kv_heads, 64, 40 + seed % 2 * 24, window, rng.choice(ROTATIONS))
    kv = make_kv(batch, layout, torch.float32, generator)
    query = torch.randn((batch.tokens, kv_heads * group, 64), generator=generator)
    call = LayerCall(0, 0.125, window, rng.choice([None, None, 2.0]))
    right = expected(batch, query, kv, call)
    segmented, pool = shared(batch, kv, rng)
    for backend in implementations():
        backend.begin(segmented)
        got = backend.attend(query, pool, call)
        torch.testing.assert_close(got.double(), right, atol=2e-5, rtol=2e-5)


def test_a_result_depends_neither_on_other_rows_nor_on_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    # Contexts of one split, of as many as there are parts, and of more.
    rows = [[6000], list(range(1500, 1530)), list(range(300)), [700], [4100, 4101, 5500]]
    batch = make_batch(rows, 16, generator)
    kv = make_kv(batch, LayerLayout(2, 64, 64), torch.float32, generator)
    query = torch.randn(batch.tokens, 6, 64, generator=generator)
    backend, call = CpuAttention(), LayerCall(0, 0.125)
    backend.begin(batch)
    together = backend.attend(query, kv, call).clone()
    threads = torch.get_num_threads()
    try:
        for other in (2, 4):
            torch.set_num_threads(other)
            backend.begin(batch)
            assert torch.equal(backend.attend(query, kv, call), together)
    finally:
        torch.set_num_threads(threads)
    batch.query_start, batch.page_start = batch.query_start[:2], batch.page_start[:2]
    batch.rows, batch.tokens = 1, 1
    backend.begin(batch)
    assert torch.equal(backend.attend(query[:1], kv, call), together[:1])


SHAPES = (
    # KV heads, group, key dim, value dim: few and many queries per KV head, keys and values that
    # are read where they lie and such as are always packed.
    (3, 3, 64, 64),
    (2, 7, 64, 64),
    (1, 1, 128, 128),
    (2, 2, 80, 80),
    (1, 3, 24, 40),
    (1, 2, 96, 32),
)


@pytest.mark.parametrize("kv_dtype", KV_TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_result_does_not_depend_on_how_a_prompt_is_cut(
    shape: tuple[int, int, int, int], kv_dtype: torch.dtype
) -> None:
    """To the last bit: rounding to 8 bits afterwards makes large differences of the least."""
    rng, generator = random.Random(str(shape)), torch.Generator().manual_seed(0)
    kv_heads, group, key_dim, value_dim = shape
    window, softcap = rng.choice([(None, None), (70, None), (300, None), (None, 2.0)])
    first, count = 490, 60
    whole = make_batch([list(range(first, first + count))], 16, generator)
    rotary = Rotary(10_000.0 ** -(np.arange(12) / 12))
    layout = LayerLayout(kv_heads, key_dim, value_dim, window=window, rotary=rotary)
    cases = [(whole, make_kv(whole, layout, kv_dtype, generator))]
    if kv_dtype != torch.int8:
        cases.append(shared(*cases[0], rng))
    query = torch.randn(count, kv_heads * group, key_dim, generator=generator)
    call = LayerCall(0, key_dim**-0.5, window, softcap)
    library, before = kernels.load(), torch.get_num_threads()
    assert library is not None
    try:
        for level, (batch, kv) in itertools.product(range(library.level + 1), cases):
            backend = CpuAttention(level=level)
            backend.begin(batch)
            found = backend.attend(query, kv, call).clone()
            for cuts in (rng.sample(range(1, count), 5), range(1, count)):
                torch.set_num_threads(rng.choice([1, 2]))
                edges = [0, *sorted(cuts), count]
                for low, high in itertools.pairwise(edges):
                    backend.begin(_part(batch, low, high))
                    part = backend.attend(query[low:high], kv, call)
                    assert torch.equal(part, found[low:high]), (level, low, high)
    finally:
        torch.set_num_threads(before)


def _part(batch: AttentionBatch, low: int, high: int) -> AttentionBatch:
    """Tokens [low, high) of a batch of one row, as a chunk of their own."""
    return replace(
        batch,
        positions=batch.positions[low:high].clone(),
        slots=batch.slots[low:high],
        query_start=torch.tensor([0, high - low], dtype=torch.int32),
        tokens=high - low,
        longest=int(batch.positions[high - 1]) + 1,
    )


def test_extreme_scores_stay_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = make_batch([list(range(90)), [600]], 16, generator)
    kv = make_kv(batch, LayerLayout(1, 64, 64), torch.float32, generator)
    query = torch.randn(batch.tokens, 1, 64, generator=generator) * 1e3
    call = LayerCall(0, 1.0)
    for backend in implementations():
        backend.begin(batch)
        got = backend.attend(query, kv, call)
        torch.testing.assert_close(
            got.double(), expected(batch, query, kv, call), atol=1e-3, rtol=1e-3
        )


def test_a_sink_joins_the_softmax_once_however_the_context_is_cut() -> None:
    """Also one so large that nothing else counts, or so small that it does not."""
    generator = torch.Generator().manual_seed(0)
    batch = make_batch([[3], list(range(90)), [1500], [5000, 5001]], 16, generator)
    kv = make_kv(batch, LayerLayout(2, 64, 64), torch.float32, generator)
    query = torch.randn(batch.tokens, 6, 64, generator=generator)
    sinks = torch.tensor([-1e4, -3.0, 0.0, 2.5, 8.0, 1e4])
    call = LayerCall(0, 0.125, sinks=sinks)
    right = expected(batch, query, kv, call)
    without = expected(batch, query, kv, LayerCall(0, 0.125))
    assert (right - without).abs().amax((0, 2)).argsort().tolist() == list(range(6))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            for backend in implementations():
                backend.begin(batch)
                got = backend.attend(query, kv, call).double()
                torch.testing.assert_close(got, right, atol=5e-6, rtol=5e-6)
    finally:
        torch.set_num_threads(threads)


def test_what_is_not_a_number_is_not_hidden() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = make_batch([list(range(80)), [70]], 16, generator)
    kv = make_kv(batch, LayerLayout(1, 64, 64), torch.float32, generator)
    query = torch.randn(batch.tokens, 2, 64, generator=generator)
    query[-1, 1] = torch.nan
    for backend in implementations():
        backend.begin(batch)
        broken = backend.attend(query, kv, LayerCall(0, 0.125)).isnan()
        assert broken[-1, 1].all()
        assert broken.sum() == 64


def test_layers_of_different_shapes_share_one_backend() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = make_batch([list(range(40)), [600]], 16, generator)
    backend = CpuAttention()
    backend.begin(batch)
    for heads, dim, dtype in ((4, 32, torch.float32), (2, 128, torch.bfloat16), (8, 16, None)):
        kv = make_kv(batch, LayerLayout(2, dim, dim), dtype or torch.float64, generator)
        query = torch.randn(batch.tokens, heads, dim, generator=generator).to(kv.dtype)
        call = LayerCall(0, 0.2)
        got = backend.attend(query, kv, call)
        right = expected(batch, query, kv, call)
        torch.testing.assert_close(got.double(), right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("name", "device", "words"),
    [
        ("cpu", "cuda", "needs --device cpu"),
        ("flashinfer", "cpu", "needs --device cuda"),
        ("paged", "cpu", "'paged'"),
    ],
)
def test_backends_that_do_not_fit_are_refused(name: str, device: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        get_backend(name, device)


def test_auto_takes_the_kernel_on_a_cpu_and_torch_elsewhere() -> None:
    assert get_backend("auto", "cpu").name == "cpu"
    assert get_backend("auto", "mps").name == "sdpa"
    assert get_backend("sdpa", "cpu").name == "sdpa"
