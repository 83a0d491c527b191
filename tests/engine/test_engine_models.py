"""The whole engine on language models: however it computes, its answers are the model's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import kvweave
from kvweave.config import CacheConfig, EngineConfig, SchedulerConfig
from kvweave.engine.engine import Engine
from kvweave.engine.llm import LLM
from kvweave.engine.scheduler.admission import Admission
from kvweave.engine.types import Completion, GenerateRequest, SamplingParams
from kvweave.errors import ConfigError, RequestError
from kvweave.models import LoadedModel, hooks
from support.enginekit import EXACT_BACKENDS, SHARING_BACKENDS
from support.tinymodels import Reference, assert_equal, reference

SYSTEM = (
    "You are a careful assistant. Answer in one short sentence, in plain words, and say so if you "
    "do not know. Text of the task:"
)
TASKS = [
    "The capital of France is",
    "Water boils at",
    "Translate to German: good morning.",
    "List three colours:",
    "def fibonacci(n):",
    "The opposite of hot is",
    "Once upon a time there was a",
    "2 + 2 =",
    "The largest planet is",
    "Write a haiku about rain.",
    "A week has seven days, which are",
    "Who wrote Hamlet?",
    "The chemical symbol of gold is",
    "In 1969, people first",
    "Explain what a cache is.",
    "The first ten prime numbers are",
    "Dear Sir or Madam,",
    "The recipe needs flour, eggs and",
    "import numpy as",
    "To be, or not to be,",
]


def make_engine(loaded: LoadedModel, backend: str, page_size: int, tokens: int, **more) -> Engine:
    cache = CacheConfig(prefix_cache_backend=backend, page_size=page_size, max_total_tokens=tokens)
    return Engine(EngineConfig(cache=cache, scheduler=SchedulerConfig(**more)), loaded)


def answers(engine: Engine, references: Sequence[Reference], count: int) -> list[list[int]]:
    """Greedy, all at once."""
    sampling = SamplingParams(temperature=0, max_tokens=count, min_tokens=count)
    for i, asked in enumerate(references):
        engine.add(GenerateRequest(rid=str(i), prompt_ids=asked.prompt, sampling=sampling))
    found: dict[str, list[int]] = {str(i): [] for i in range(len(references))}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            found[delta.rid] += delta.token_ids
        engine.check()
    return list(found.values())


@pytest.fixture(scope="module")
def real(packaged: LoadedModel) -> list[Reference]:
    prompts = [packaged.tokenizer.encode(f"{SYSTEM} {task}") for task in TASKS]
    found = [reference(packaged, prompt, 10) for prompt in prompts]
    assert sum(each.clear for each in found) > 0.9 * 10 * len(found)
    return found


@pytest.mark.model
@pytest.mark.parametrize(
    ("backend", "page_size", "chunk", "pool"),
    [
        ("none", 16, 2048, 4096),
        ("hash", 1, 96, 4096),
        ("hash", 16, 2048, 4096),
        ("hash", 128, 300, 8192),
        ("radix", 1, 2048, 4096),
        ("radix", 16, 96, 4096),
        ("radix", 128, 2048, 8192),
    ],
)
def test_twenty_real_prompts_are_answered_as_transformers_does(
    packaged, real, backend, page_size, chunk, pool
):
    engine = make_engine(packaged, backend, page_size, pool, chunked_prefill_size=chunk)
    assert_equal(answers(engine, real, 10), real)
    snapshot = engine.snapshot()
    assert snapshot.preemptions == 0
    # Of prompts that arrive together, radix shares the beginning, hash what a step before computed.
    shared = backend == "radix" or (backend == "hash" and chunk < 100)
    assert (sum(snapshot.hit_tokens.values()) > 0) == (shared and page_size < 128)


@pytest.mark.model
@pytest.mark.parametrize(
    ("backend", "page_size", "pool"),
    [("none", 1, 112), ("hash", 4, 84), ("radix", 1, 64), ("radix", 4, 80)],
)
def test_and_when_they_preempt_each_other(packaged, real, backend, page_size, pool, monkeypatch):
    monkeypatch.setattr(Admission, "_reserve", lambda *_: 0)
    engine = make_engine(packaged, backend, page_size, pool, chunked_prefill_size=64)
    some = sorted(real, key=lambda each: len(each.prompt))[:6]
    assert_equal(answers(engine, some, 10), some)
    assert engine.snapshot().preemptions > 0


@pytest.fixture(scope="module")
def small(tiny: Callable[[str], LoadedModel]) -> Callable[[str], list[Reference]]:
    def references(name: str) -> list[Reference]:
        generator = torch.Generator().manual_seed(3)
        shared = torch.randint(0, 256, (40,), generator=generator).tolist()
        prompts = [
            shared[: 8 * (i % 6)] + torch.randint(0, 256, (9 + i,), generator=generator).tolist()
            for i in range(8)
        ]
        return [reference(tiny(name), prompt, 24) for prompt in prompts]

    return references


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_oss"])
def test_tiny_models_in_every_backend_page_size_and_chunk(tiny, small, name):
    loaded, expected = tiny(name), small(name)
    for backend in EXACT_BACKENDS:
        for page_size, chunk in ((1, 64), (16, 5), (16, 2048), (128, 64)):
            engine = make_engine(loaded, backend, page_size, 2048, chunked_prefill_size=chunk)
            assert_equal(answers(engine, expected, 24), expected)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_tiny_models_under_preemption_and_warm(tiny, small, name, backend):
    loaded, expected = tiny(name), small(name)
    for page_size in (1, 16):
        engine = make_engine(loaded, backend, page_size, 160, chunked_prefill_size=32)
        assert_equal(answers(engine, expected, 24), expected)
        assert engine.snapshot().preemptions > 0
        assert_equal(answers(engine, expected[::-1], 24), expected[::-1])


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[[str], object]) -> LLM:
    return LLM(str(tiny_folder("llama")), max_total_tokens=4096, prefix_cache_backend="radix")


def test_a_script_gets_completions_by_prompt_and_sample(llm):
    sampling = SamplingParams(max_tokens=5, temperature=0, n=2, ignore_eos=True, logprobs=1)
    one = llm.generate("Hello there", sampling)
    assert [type(each) for each in one] == [Completion, Completion]
    assert len(one[0].token_ids) == len(one[0].logprobs) == 5
    assert one[0].text == llm.tokenizer.decode(one[0].token_ids)
    assert one[0].finish_reason == "length"
    assert one[0].first_token_seconds > 0
    ids = llm.tokenizer.encode("Hello there")
    many = llm.generate(["Hello there", ids], [sampling, SamplingParams(max_tokens=2)])
    assert [len(answers) for answers in many] == [2, 1]
    assert many[0][0].token_ids == one[0].token_ids == llm.generate(ids, sampling)[0].token_ids
    assert many[1][0].usage.cached_tokens == 0
    assert llm.generate([]) == []


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def test_conversations_are_written_by_the_chat_template(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0)
    one = [{"role": "user", "content": "Hello."}]
    two = [{"role": "system", "content": "Be brief."}, *one]
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat(one, sampling)
    llm.tokenizer.chat_template = TEMPLATE
    try:
        expected = llm.generate("<system>Be brief.<user>Hello.<assistant>", sampling)[0]
        assert llm.chat(two, sampling)[0].token_ids == expected.token_ids
        several = llm.chat([one, two], sampling)
        assert [len(each) for each in several] == [1, 1]
        assert several[1][0].token_ids == expected.token_ids
        with pytest.raises(RequestError, match="refuses these messages"):
            llm.chat([{"role": "user", "content": "x"}], sampling, chat_template="{{ no() }}")
    finally:
        llm.tokenizer.chat_template = None


def test_an_order_is_proposed_and_what_it_promises_is_reused(llm: LLM) -> None:
    head, tail = "Read this:\n", "What is it about?"
    pieces = [f"{name * 12} is the {name} of pieces.\n" for name in ("one", "two", "three")]
    once = SamplingParams(max_tokens=1, temperature=0)
    llm.flush_cache()
    assert llm.propose_order(head, pieces, tail).order == (0, 1, 2)
    llm.generate(head + pieces[2] + pieces[0] + pieces[1] + "Who wrote it?", once)
    proposal = llm.propose_order(head, pieces, tail)
    assert proposal.order == (2, 0, 1)
    assert proposal.exact_as_given == 0
    prompt = head + "".join(pieces[at] for at in proposal.order) + tail
    [answer] = llm.generate(prompt, once)
    assert answer.usage.cached_tokens == proposal.exact > 0.8 * answer.usage.prompt_tokens
    assert llm.propose_order(head, [pieces[at] for at in proposal.order], tail).gain == 0


def test_a_script_may_bring_more_prompts_than_may_wait(tiny_folder):
    llm = LLM(str(tiny_folder("llama")), max_queued_requests=2, max_total_tokens=2048)
    found = llm.generate([[i, 7, 9] for i in range(12)], SamplingParams(max_tokens=2, n=2))
    assert [len(each) for each in found] == [2] * 12


def test_a_bad_prompt_is_refused_before_anything_is_computed_and_flags_by_name(llm, tiny_folder):
    before = llm.engine.snapshot()
    with pytest.raises(RequestError):
        llm.generate([[1, 2], [10**6]])
    assert llm.engine.snapshot() == before
    with pytest.raises(ValueError, match="2 prompts need 2"):
        llm.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(ConfigError, match="no setting 'page_sise'"):
        LLM(str(tiny_folder("llama")), page_sise=3)
    llm.flush_cache()
    assert llm.engine.snapshot().cached_tokens == 0


def test_the_package_exports_what_scripts_need():
    assert kvweave.LLM is LLM
    assert kvweave.SamplingParams is SamplingParams
    with pytest.raises(AttributeError):
        _ = kvweave.nothing


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma4"])
@pytest.mark.parametrize("backend", SHARING_BACKENDS)
def test_prompt_logprobs_are_the_models_own_cached_or_not(tiny, name, backend):
    """To four decimals, as transformers computes them."""
    loaded = tiny(name)
    engine = make_engine(loaded, backend, 16, 1024, chunked_prefill_size=32)
    tokens = tuple(range(5, 105))
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=2)
    found = []
    for rid in ("cold", "warm"):
        engine.add(GenerateRequest(rid=rid, prompt_ids=tokens, sampling=sampling))
        while engine.has_work:
            found += [delta.prompt_logprobs for delta in engine.step() if delta.prompt_logprobs]
    with hooks.implementation(loaded.model, "eager"), torch.inference_mode():
        expected = loaded.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    for scores in found:
        assert scores[0].logprob is None
        for at, score in enumerate(scores[1:]):
            assert score.token_id == tokens[at + 1]
            assert score.logprob == pytest.approx(float(expected[at, tokens[at + 1]]), abs=5e-5)
