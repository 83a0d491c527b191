"""Moved text that is read where the donor has it answers as its copy does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch

from kvweave.config import CacheConfig, EngineConfig, ModelConfig
from kvweave.engine.engine import Engine
from kvweave.engine.types import GenerateRequest, SamplingParams
from kvweave.errors import IntegrityError
from kvweave.models import LoadedModel
from support.fuzzy_world import SMALL, World, joined, text

KINDS = (
    "llama",
    "mistral",
    "mla_v2",
    "gemma2",
    "mla_interleaved",
    "gemma3",
    "gptj",
    "gpt_oss",
    "yarn",
    "gemma4",
    "smollm3",
    "phi3",
    "mla_half",
    "neox",
    "qwen3",
    "qwen2",
    "llama3",
    "linear",
)

DOCUMENT = np.random.default_rng(1).integers(0, 256, 300).tolist()


def served(
    loaded: LoadedModel, share_span: int, page_size: int, backend: str = "auto", refresh: int = 0
) -> tuple[list[tuple[int, ...]], list[int], list[float], int]:
    """Of three askers of one document at once: ids, shared tokens, log probabilities, pages."""
    config = EngineConfig(
        model=ModelConfig(attention_backend=backend),
        cache=CacheConfig(
            prefix_cache_backend="fuzzy_match", page_size=page_size, max_total_tokens=4096
        ),
        fuzzy=replace(SMALL, share_span=share_span, refresh_tokens=refresh),
    )
    engine = Engine(config, loaded)
    rng = np.random.default_rng(2)
    document = DOCUMENT[: 300 if page_size == 128 else 180]
    heads = [rng.integers(0, 256, 11 + 7 * at).tolist() for at in range(4)]
    answers: dict[str, list[int]] = {}
    logprobs: list[float] = []
    shared, peak = [], 0

    def run(*prompts: list[int]) -> None:
        nonlocal peak
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
        for prompt in prompts:
            rid = str(len(answers))
            answers[rid] = []
            engine.add(GenerateRequest(rid=rid, prompt_ids=tuple(prompt), sampling=sampling))
        while engine.has_work:
            for delta in engine.step():
                answers[delta.rid] += delta.token_ids
                logprobs.extend(each.logprob for each in delta.logprobs if each.logprob)
                shared.extend(span.shared for span in delta.plan)
                if delta.plan:
                    assert delta.usage.reuse.shared == sum(span.shared for span in delta.plan)
            leases = [one.lease for one in engine.scheduler.running if one.lease is not None]
            engine.cache.inspector.check(leases)
            pool = engine.components.pool
            peak = max(peak, pool.num_pages - pool.num_free)

    run(heads[0] + document + heads[1])
    run(*(head + document + head[:9] for head in heads[1:]))
    ids = [tuple(answer) for answer in answers.values()]
    assert pool_is_whole(engine)
    return ids, shared, logprobs, peak


def pool_is_whole(engine: Engine) -> bool:
    engine.flush_cache()
    return engine.components.pool.num_free == engine.components.pool.num_pages


@pytest.mark.parametrize(("kind", "page_size"), zip(KINDS, cycle((1, 16, 128)), strict=False))
def test_answers_are_those_of_copies(
    kind: str, page_size: int, tiny: Callable[[str], LoadedModel]
) -> None:
    loaded = tiny(kind)
    if page_size == 128:
        loaded = replace(loaded, context_length=512)
    ids, none, right, copies = served(loaded, 0, page_size)
    assert not any(none)
    for backend in ("cpu", "sdpa"):
        got, shared, found, pages = served(loaded, 16, page_size, backend)
        assert got == ids
        assert sum(shared) >= 3 * 128
        assert pages <= copies - sum(shared) // page_size
        np.testing.assert_allclose(found, right, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_every_type_of_kv_can_be_shared(
    dtype: torch.dtype, tiny: Callable[[str], LoadedModel]
) -> None:
    loaded = tiny("llama")
    _, _, right, _ = served(loaded, 0, 4)
    _, shared, found, _ = served(replace(loaded, kv_dtype=dtype), 16, 4, refresh=8)
    assert sum(shared) > 200
    assert np.abs(np.array(found) - right).mean() < 0.2


def test_what_is_computed_again_is_the_requests_own() -> None:
    world = World(128, 4, replace(SMALL, share_span=16, refresh_tokens=10))
    document = text(1, 90)
    world.serve(joined(text(2, 8), document, text(3, 10)))
    one = world.start(joined(text(4, 17), document, text(5, 9)))
    [span], [run] = one.lease.plan.spans, one.lease.shared
    assert (run.start, run.end) == (27, 107)  # behind 10 tokens from 17 on
    assert span.shared == 80
    assert len(one.lease.pages) == 7  # for its other 27 tokens
    assert set(one.lease.plan.recompute.tolist()) == set(range(17, 27))
    assert world.compute(one)
    world.check()


def test_a_donor_stays_until_its_last_reader_is_gone() -> None:
    world = World(64, 4, replace(SMALL, share_span=16))
    document = text(1, 90)
    world.serve(joined(text(2, 8), document))
    donors = {page for node in world.cache.tree.nodes() for page in node.pages.tolist()}
    readers = [world.start(joined(text(10 + at, 9), document, text(20, 8))) for at in range(3)]
    assert all(one.lease.shared for one in readers)
    world.cache.evict(64)
    world.check()
    read = {page for one in readers for run in one.lease.shared for page in run.pages.tolist()}
    for one in readers:
        assert world.compute(one)
        world.finish(one)
        world.cache.evict(1 if world.live else 64)
        assert bool(world.live) == all(world.pool.owners(page) for page in read)
        world.check()
    assert read <= donors
    assert world.pool.num_free == 64


def test_a_copy_that_fails_leaves_nothing_shared() -> None:
    world = World(64, 4, replace(SMALL, share_span=16))
    document = text(1, 90)
    world.serve(joined(text(2, 8), document))
    world.mover.fail_next = True
    one = world.start(joined(text(3, 9), document, text(4, 8)))
    assert not one.lease.shared
    assert not one.lease.plan.spans
    world.check()


def test_a_shared_page_that_could_go_is_found() -> None:
    world = World(64, 4, replace(SMALL, share_span=16))
    document = text(1, 90)
    world.serve(joined(text(2, 8), document))
    one = world.start(joined(text(3, 9), document, text(4, 8)))
    world.check()
    run = one.lease.shared[0]
    one.lease.shared = (replace(run, slot=run.slot + 1),)
    with pytest.raises(IntegrityError, match="may cease to be"):
        world.cache.check([one.lease])


def test_what_a_session_computed_behind_a_shared_span_serves_its_next_request() -> None:
    """It begins in the middle of a page: the request's own pages leave the shared span out."""
    world = World(128, 4, replace(SMALL, share_span=16))
    document, question = text(1, 90), text(3, 21)
    world.serve(joined(text(2, 8), document, text(7, 6)))
    first = world.start(joined(text(4, 9), document, question), session="s")
    assert first.lease.own_slot(99) == 9
    assert first.lease.own_slots(np.array([3, 99, 119])).tolist() == [3, 9, 29]
    assert world.compute(first)
    world.finish(first, well=True)
    second = world.start(joined(text(5, 14), question, text(6, 5)), session="s")
    [span] = second.lease.plan.spans
    assert (span.start, span.length, span.generation) == (14, 21, 1)
    world.check()
