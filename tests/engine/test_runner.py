"""The runner: packed, chunked, out of order, it computes what transformers computes in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvweave.engine.attention import get_backend
from kvweave.engine.attention.base import ForwardBatch
from kvweave.engine.execution.runner import ModelRunner
from kvweave.kv.tensors import KVTensors
from kvweave.models import LoadedModel, hooks
from support.tinymodels import TINY, VOCABULARY

LENGTHS = (29, 12, 41)
GARBAGE = 1e3
"""What unwritten slots hold: large enough to spoil whatever reads them."""


@dataclass
class Row:
    """A text and its pages."""

    tokens: np.ndarray
    pages: np.ndarray


class Bench:
    """A runner over a pool of shuffled pages, and rows that own some of them."""

    def __init__(
        self, loaded: LoadedModel, texts: Sequence[np.ndarray], page_size: int, backend: str
    ) -> None:
        self.loaded = loaded
        self.page_size = page_size
        needs = [-(-len(text) // page_size) for text in texts]
        num_pages = sum(needs) + 3
        self.kv = KVTensors(loaded.layouts, num_pages, page_size)
        for tensor in (*self.kv.keys, *self.kv.values):
            tensor.fill_(GARBAGE)
        order = np.random.default_rng(3).permutation(num_pages).astype(np.int32)
        starts = np.cumsum([0, *needs])
        self.rows = [
            Row(text, order[first : first + need])
            for text, first, need in zip(texts, starts, needs, strict=False)
        ]
        self.runner = ModelRunner(loaded, self.kv, get_backend(backend, "cpu"))

    def slots(self, row: Row, positions: np.ndarray) -> np.ndarray:
        pages = row.pages[positions // self.page_size].astype(np.int64)
        return pages * self.page_size + positions % self.page_size

    def forward(self, work: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
        """Compute the given positions of the given rows together; the logits of all of them."""
        rows = [self.rows[index] for index, _ in work]
        at = [np.array(positions, np.int64) for _, positions in work]
        needs = [int(positions.max()) // self.page_size + 1 for positions in at]
        tables = [row.pages[:need] for row, need in zip(rows, needs, strict=True)]
        total = sum(len(p) for p in at)
        return self.runner.forward(
            ForwardBatch(
                token_ids=np.concatenate([r.tokens[p] for r, p in zip(rows, at, strict=True)]),
                positions=np.concatenate(at),
                slots=np.concatenate([self.slots(r, p) for r, p in zip(rows, at, strict=True)]),
                query_start=np.cumsum([0, *map(len, at)]).astype(np.int32),
                pages=np.concatenate(tables),
                page_start=np.cumsum([0, *map(len, tables)]).astype(np.int32),
                page_size=self.page_size,
                logits_at=np.arange(total, dtype=np.int64),
            )
        )

    def expected(self, index: int) -> torch.Tensor:
        """What transformers says of the whole text, all at once."""
        with hooks.implementation(self.loaded.model, "eager"), torch.inference_mode():
            ids = torch.from_numpy(self.rows[index].tokens)[None]
            return self.loaded.model(input_ids=ids, use_cache=False).logits[0].float()


def texts() -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.integers(0, VOCABULARY, length) for length in LENGTHS]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3 * expected.std().item())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", TINY)
def test_mixed_chunks_equal_one_plain_pass(
    name: str, page_size: int, tiny: Callable[[str], LoadedModel]
) -> None:
    """Chunks of prompts and single tokens of several rows in one batch, whatever the model."""
    bench = Bench(tiny(name), texts(), page_size, "cpu")
    steps = [
        [(0, range(0, 29)), (1, range(0, 5))],
        [(2, range(0, 17)), (1, range(5, 6))],
        [(1, range(6, 12)), (2, range(17, 40))],
        [(2, range(40, 41))],
    ]
    found: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    for step in steps:
        logits = bench.forward(step)
        assert logits.dtype == torch.float32
        parts = logits.split([len(positions) for _, positions in step])
        for (index, _), part in zip(step, parts, strict=True):
            found[index].append(part)
    for index, parts in found.items():
        assert_close(torch.cat(parts), bench.expected(index))


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
def test_fresh_tokens_between_kept_ones(
    name: str, backend: str, tiny: Callable[[str], LoadedModel]
) -> None:
    """Positions with holes: each query sees all earlier positions, fresh in this batch or not."""
    bench = Bench(tiny(name), texts(), 4, backend)
    for index, length in enumerate(LENGTHS):
        bench.forward([(index, range(length))])
    holes = {0: [3, 4, 9, 20, 21, 28], 2: [0, 1, 7, 30, 40]}
    for index, positions in holes.items():
        slots = torch.from_numpy(bench.slots(bench.rows[index], np.array(positions)))
        for tensor in (*bench.kv.keys, *bench.kv.values):
            tensor[slots] = GARBAGE
    work = [(2, holes[2]), (1, [11]), (0, holes[0])]
    parts = bench.forward(work).split([len(positions) for _, positions in work])
    for (index, positions), part in zip(work, parts, strict=True):
        assert_close(part, bench.expected(index)[list(positions)])


def test_logits_come_in_the_order_asked_for(tiny: Callable[[str], LoadedModel]) -> None:
    bench = Bench(tiny("llama"), texts(), 4, "cpu")
    everything = bench.forward([(0, range(29))])
    row = bench.rows[0]
    at = np.arange(29)
    batch = ForwardBatch(
        token_ids=row.tokens,
        positions=at,
        slots=bench.slots(row, at),
        query_start=np.array([0, 29], np.int32),
        pages=row.pages,
        page_start=np.array([0, len(row.pages)], np.int32),
        page_size=4,
        logits_at=np.array([28, 0, 7]),
    )
    assert_close(bench.runner.forward(batch), everything[[28, 0, 7]])


def test_no_logits_are_computed_when_none_are_wanted(tiny: Callable[[str], LoadedModel]) -> None:
    bench = Bench(tiny("gemma2"), texts(), 4, "cpu")
    row = bench.rows[1]
    at = np.arange(12)
    batch = ForwardBatch(
        token_ids=row.tokens,
        positions=at,
        slots=bench.slots(row, at),
        query_start=np.array([0, 12], np.int32),
        pages=row.pages,
        page_start=np.array([0, len(row.pages)], np.int32),
        page_size=4,
        logits_at=np.zeros(0, np.int64),
    )
    assert bench.runner.forward(batch).shape == (0, VOCABULARY)
    assert float(bench.kv.keys[2][bench.slots(row, at)].abs().max()) < GARBAGE


def test_two_runners_share_a_model_and_no_kv(tiny: Callable[[str], LoadedModel]) -> None:
    loaded = tiny("llama")
    first, second = (Bench(loaded, [text], 4, "cpu") for text in texts()[:2])
    first.forward([(0, range(10))])
    second.forward([(0, range(11))])
    assert_close(first.forward([(0, range(10, 29))]), first.expected(0)[10:])
    assert_close(second.forward([(0, [11])]), second.expected(0)[11:])


def test_a_failed_pass_leaves_nothing_behind(tiny: Callable[[str], LoadedModel]) -> None:
    bench = Bench(tiny("llama"), texts(), 4, "cpu")

    class Broken:
        name = "broken"

        def begin(self, batch: object) -> None:
            raise RuntimeError("no memory")

    good, bench.runner.backend = bench.runner.backend, Broken()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="no memory"):
        bench.forward([(0, range(29))])
    with pytest.raises(Exception, match="outside a forward pass"):
        bench.loaded.model(input_ids=torch.tensor([[1]]), use_cache=False)
    bench.runner.backend = good
    assert_close(bench.forward([(0, range(29))]), bench.expected(0))


@pytest.mark.model
@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_tokens_equal_generate(packaged: LoadedModel, page_size: int) -> None:
    prompt = "The three largest cities of Australia, with a sentence on each of them, are:"
    ids = packaged.tokenizer(prompt).input_ids
    with hooks.implementation(packaged.model, "sdpa"):
        generated = packaged.model.generate(
            torch.tensor([ids]), max_new_tokens=32, do_sample=False, pad_token_id=2
        )[0].tolist()
    text = np.array(ids + [0] * 32)
    bench = Bench(packaged, [text], page_size, "cpu")
    known, done = len(ids), 0
    while known < len(generated):
        logits = bench.forward([(0, range(done, known))])
        done = known
        bench.rows[0].tokens[known] = int(logits[-1].argmax())
        known += 1
    assert bench.rows[0].tokens[:known].tolist() == generated
    assert known == len(ids) + 32


@pytest.mark.model
def test_a_chat_ends_by_itself(packaged: LoadedModel) -> None:
    """The end-of-answer token is the one that the model really gives."""
    ids = packaged.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say only: yes"}], add_generation_prompt=True
    )["input_ids"]
    bench = Bench(packaged, [np.array(ids + [0] * 40)], 16, "cpu")
    known, done = len(ids), 0
    while known < len(ids) + 40:
        logits = bench.forward([(0, range(done, known))])
        done = known
        token = int(logits[-1].argmax())
        if token in packaged.eos_token_ids:
            return
        bench.rows[0].tokens[known] = token
        known += 1
    pytest.fail("no end within 40 tokens")
