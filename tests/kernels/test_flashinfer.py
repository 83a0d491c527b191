"""The FlashInfer backend, against a stand-in that does what FlashInfer documents, on the CPU."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest
import torch

from kvweave.engine.attention import LayerCall
from kvweave.engine.attention.flashinfer import FlashInferAttention
from kvweave.kv.layout import LayerLayout
from support.attention_batches import expected, make_batch, make_kv

ROWS = [
    list(range(20)),
    [99],
    list(range(30, 45)),
    [0, 1, 2, 7, 8, 30, 63, 64, 65],
    list(range(45, 49)),
]
"""The third and the last would look like one run if rows were not told apart."""


class PagedAttention:
    """A row's queries are the last tokens of its pages' content; later queries see more."""

    plans = 0

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(
        self,
        query_start: torch.Tensor,
        page_start: torch.Tensor,
        pages: torch.Tensor,
        last_page: torch.Tensor,
        heads: int,
        kv_heads: int,
        dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        assert options.pop("causal") is True
        for array in (query_start, page_start, pages, last_page):
            assert array.dtype == torch.int32
        assert bool(((last_page >= 1) & (last_page <= page_size)).all())
        PagedAttention.plans += 1
        self.rows = query_start, page_start, pages, last_page
        self.heads, self.kv_heads, self.page_size, self.options = (
            heads,
            kv_heads,
            page_size,
            options,
        )

    def run(
        self, query: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor], return_lse: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        query_start, page_start, pages, last_page = self.rows
        out = torch.full_like(query, torch.nan)
        lse = torch.full(query.shape[:2], torch.nan)
        for row in range(len(last_page)):
            first, last = int(query_start[row]), int(query_start[row + 1])
            used = pages[int(page_start[row]) : int(page_start[row + 1])].long()
            length = (len(used) - 1) * self.page_size + int(last_page[row])
            group = self.heads // self.kv_heads
            k, v = (
                half[used].flatten(0, 1)[:length].repeat_interleave(group, 1).transpose(0, 1)
                for half in pool
            )
            scores = query[first:last].transpose(0, 1).float() @ k.float().transpose(1, 2)
            scores = scores * self.options["sm_scale"]
            if self.options["logits_soft_cap"]:
                cap = self.options["logits_soft_cap"]
                scores = cap * torch.tanh(scores / cap)
            at = torch.arange(length - (last - first), length)[:, None]
            seen = torch.arange(length) <= at
            if self.options["window_left"] >= 0:
                seen &= torch.arange(length) >= at - self.options["window_left"]
            scores = scores.masked_fill(~seen, -torch.inf)
            weights = scores.softmax(-1)
            lse[first:last] = (scores.logsumexp(-1) / math.log(2)).transpose(0, 1)
            out[first:last] = (weights @ v.float()).transpose(0, 1).to(out.dtype)
        return (out, lse) if return_lse else out


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = PagedAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(PagedAttention, "plans", 0)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (64, 32)])
def test_gaps_windows_and_what_flashinfer_lacks(
    window: int | None, dtype: torch.dtype, dims: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = make_batch(ROWS, 16, generator)
    kv = make_kv(batch, LayerLayout(2, *dims), dtype, generator)
    for pool in (kv.keys[0], kv.values[0]):
        pool.nan_to_num_()  # the stand-in multiplies hidden values by zero
    query = torch.randn(batch.tokens, 6, dims[0], generator=generator).to(dtype)
    backend = FlashInferAttention("cpu")
    backend.begin(batch)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 2.0, 4.0, 9.0])
    for softcap, sink in ((None, None), (3.0, None), (None, sinks)):
        call = LayerCall(0, 0.125, window, softcap, sink)
        right = expected(batch, query, kv, call)
        for _ in range(2):
            got = backend.attend(query, kv, call)
            torch.testing.assert_close(got.double(), right, atol=2e-2, rtol=2e-2)
    served_by_flashinfer = dtype == torch.bfloat16 and dims == (64, 64)
    # One plan for each kind of layer and batch, however many layers there are.
    assert PagedAttention.plans == (2 if served_by_flashinfer else 0)
    backend.begin(batch)
    backend.attend(query, kv, LayerCall(0, 0.125, window))
    assert PagedAttention.plans == (3 if served_by_flashinfer else 0)
